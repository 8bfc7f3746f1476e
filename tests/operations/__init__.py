"""Every rule alone: attacked over the enclosures of its arguments, and met where its bound is attained."""
