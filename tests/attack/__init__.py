"""The attack on certificates: random networks, random domains, and a search for values a certificate excludes."""
