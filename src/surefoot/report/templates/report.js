"use strict";
(() => {
  const page = document.documentElement;

  // The theme: that of the system, until the button is used. Pages from disk may have no storage.
  const storage = {
    read() { try { return localStorage.getItem("surefoot-theme"); } catch { return null; } },
    write(theme) { try { localStorage.setItem("surefoot-theme", theme); } catch { /* not remembered */ } },
  };
  const stored = storage.read();
  if (stored === "light" || stored === "dark") page.dataset.theme = stored;

  function themes(button) {
    const system = matchMedia("(prefers-color-scheme: dark)");
    const present = () => page.dataset.theme || (system.matches ? "dark" : "light");
    const other = () => (present() === "dark" ? "light" : "dark");
    const label = () => button.setAttribute("aria-label", `Switch to the ${other()} theme`);
    button.addEventListener("click", () => {
      page.dataset.theme = other();
      storage.write(page.dataset.theme);
      label();
    });
    system.addEventListener("change", label);
    button.hidden = false;
    label();
  }

  // A table: sorted by any column, filtered, and as a tree while it is in the order of computation.
  function sortable(table) {
    const body = table.tBodies[0];
    const lines = [...body.rows];
    const heads = [...table.tHead.rows[0].cells];
    const tools = document.querySelector(`[data-for="${table.id}"]`);
    const collator = new Intl.Collator("en", { numeric: true });
    const folded = new Set();
    let column = heads.findIndex((head) => head.getAttribute("aria-sort") !== "none");
    let descending = false;
    let wanted = "";

    const key = (line) => line.cells[column].dataset.v;
    const isTree = () => table.classList.contains("layers") && heads[column].ariaSort === "ascending"
      && heads[column].firstElementChild.dataset.sort === "position" && !wanted;
    const matches = (line) => [...line.cells].slice(1, 3).some((cell) => cell.dataset.v.toLowerCase().includes(wanted));

    function order() {
      if (column < 0) return lines;
      const numeric = heads[column].firstElementChild.dataset.kind === "number";
      const compare = numeric
        ? (a, b) => (Number(a) < Number(b) ? -1 : Number(a) > Number(b) ? 1 : 0)
        : collator.compare;
      const sign = descending ? -1 : 1;
      return lines.filter((line) => line.classList.contains("op")).sort((a, b) => sign * compare(key(a), key(b)));
    }

    function show() {
      const tree = column >= 0 && isTree();
      const filtered = Boolean(tools);
      table.classList.toggle("tree", tree);
      const shown = tree ? lines : order();
      let hiddenBelow = Infinity;
      let count = 0;
      for (const line of lines) line.hidden = true;
      for (const line of shown) {
        const depth = Number(line.dataset.depth || 0);
        if (depth <= hiddenBelow) hiddenBelow = Infinity;
        line.hidden = tree ? depth > hiddenBelow : filtered && wanted !== "" && !matches(line);
        if (tree && !line.hidden && folded.has(line)) hiddenBelow = depth;
        if (!line.hidden && line.classList.contains("op")) count += 1;
      }
      body.append(...shown);
      if (!tools) return;
      const all = Number(table.dataset.operations);
      tools.querySelector(".count").textContent = `${wanted ? `${count} of ` : ""}${all} operation${all === 1 ? "" : "s"}`;
      for (const button of tools.querySelectorAll("[data-fold]")) button.disabled = !tree;
    }

    function fold(line, close) {
      line.querySelector(".fold").setAttribute("aria-expanded", String(!close));
      if (close) folded.add(line); else folded.delete(line);
    }

    heads.forEach((head, index) => {
      const button = head.firstElementChild;
      button.addEventListener("click", () => {
        const first = button.dataset.kind === "number" && button.dataset.sort !== "position";
        descending = index === column ? !descending : first;
        column = index;
        heads.forEach((one) => one.setAttribute("aria-sort", "none"));
        head.setAttribute("aria-sort", descending ? "descending" : "ascending");
        show();
      });
    });

    const groups = lines.filter((line) => line.classList.contains("group"));
    for (const line of groups) {
      line.querySelector(".fold").addEventListener("click", () => { fold(line, !folded.has(line)); show(); });
    }
    if (tools) {
      tools.querySelector("input").addEventListener("input", (event) => {
        wanted = event.target.value.trim().toLowerCase();
        show();
      });
      for (const button of tools.querySelectorAll("[data-fold]")) {
        button.hidden = groups.length === 0;
        button.addEventListener("click", () => {
          groups.forEach((line) => fold(line, button.dataset.fold === "all"));
          show();
        });
      }
      const most = 60;
      if (lines.length > most) groups.filter((line) => line.dataset.depth !== "0").forEach((line) => fold(line, true));
      show();
    }
  }

  // A chart: what is under the pointer, or under the cursor that the arrow keys move.
  function element(tag, text) {
    const made = document.createElement(tag);
    made.textContent = text;
    return made;
  }

  // The architecture: a tree of boxes, each before those inside of it; the arrow keys walk from box to box.
  function walk(figure) {
    const { boxes } = JSON.parse(document.getElementById(figure.dataset.source).textContent);
    const items = [...figure.querySelectorAll("[role=treeitem]")];
    const level = items.map((item) => Number(item.getAttribute("aria-level")));
    const shown = figure.querySelector(".walked");
    const names = ["module", "operation", "output", "m", "ℓ", "L", "share of L"];
    let at = 0;

    function show(place, focus) {
      items[at].setAttribute("aria-selected", "false");
      items[at].setAttribute("tabindex", "-1");
      at = place;
      items[at].setAttribute("aria-selected", "true");
      items[at].setAttribute("tabindex", "0");
      if (focus) items[at].focus();
      shown.replaceChildren(...names.map((name, k) => {
        const pair = document.createElement("div");
        pair.append(element("dt", name), element("dd", boxes[at][k]));
        return pair;
      }));
    }

    function towards(step) {
      for (let k = at + step; k >= 0 && k < items.length; k += step) if (level[k] <= level[at]) return k;
      return at;
    }

    function outwards() {
      for (let k = at - 1; k >= 0; k -= 1) if (level[k] < level[at]) return k;
      return at;
    }

    const moves = {
      ArrowRight: () => towards(1),
      ArrowLeft: () => towards(-1),
      ArrowDown: () => (level[at + 1] > level[at] ? at + 1 : at),
      ArrowUp: outwards,
      Home: () => 0,
      End: () => items.length - 1,
    };
    items.forEach((item, k) => {
      item.addEventListener("pointerenter", () => show(k, false));
      item.addEventListener("click", () => show(k, true));
      item.addEventListener("focus", () => show(k, false));
      item.addEventListener("keydown", (event) => {
        const move = moves[event.key];
        if (!move || event.ctrlKey || event.metaKey || event.altKey) return;
        event.preventDefault();
        show(move(), true);
      });
    });
    const widest = items.map((item, k) => [level[k + 1] > level[k] ? -1 : Number(item.querySelector("rect").getAttribute("fill-opacity")), k]);
    show(widest.reduce((best, one) => (one[0] > best[0] ? one : best))[1], false);
  }

  // The radius: one of the certificates that were computed beforehand.
  function radii(figure) {
    const { radii: { rows } } = JSON.parse(document.getElementById(figure.dataset.source).textContent);
    const slider = figure.querySelector("input");
    const values = [figure.querySelector("output"), ...figure.querySelectorAll("dd"), figure.querySelector("p")];
    const lines = [...figure.querySelectorAll("tbody tr")];
    slider.addEventListener("input", () => {
      const row = rows[Number(slider.value)];
      values.forEach((place, k) => { place.textContent = row[k]; });
      slider.setAttribute("aria-valuetext", row[0]);
      lines.forEach((line, k) => line.classList.toggle("present", k === Number(slider.value)));
    });
  }

  function chart(figure) {
    const data = JSON.parse(document.getElementById(figure.dataset.source).textContent);
    const plot = figure.querySelector(".plot");
    const tip = figure.querySelector(".tip");
    const mark = figure.querySelector(".mark");
    const count = Number(plot.dataset.count);
    const isMatrix = figure.dataset.chart === "blocks";
    const places = data.places || Array.from({ length: count }, (_, k) => k + 0.5);
    const span = isMatrix ? count : data.width || count;
    let x = 0;
    let y = 0;

    function content() {
      if (isMatrix) {
        const value = data.cells[Math.max(x, y)][Math.min(x, y)];
        return [element("b", value), element("span", data.blocks[y]), element("span", `with ${x === y ? "itself" : data.blocks[x]}`)];
      }
      const [name, about, ...values] = data.rows[x];
      return [element("b", name), element("span", about),
        ...values.map((value, k) => element("div", `${data.names[k]} = ${value || "unknown"}`))];
    }

    function show() {
      plot.classList.add("active");
      if (isMatrix) { mark.setAttribute("x", x); mark.setAttribute("y", y); }
      else mark.setAttribute("transform", `translate(${places[x]} 0)`);
      tip.replaceChildren(...content());
      tip.hidden = false;
      const width = plot.clientWidth;
      const left = ((isMatrix ? x + 0.5 : places[x]) / span) * width;
      const beside = left + 14 + tip.offsetWidth <= width ? left + 14 : left - 14 - tip.offsetWidth;
      tip.style.left = `${Math.max(0, Math.min(beside, width - tip.offsetWidth))}px`;
      const top = isMatrix ? ((y + 0.5) / count) * plot.clientHeight + 12 : 8;
      tip.style.top = `${Math.max(0, Math.min(top, plot.clientHeight - tip.offsetHeight))}px`;
    }

    function hide() {
      plot.classList.remove("active");
      tip.hidden = true;
    }

    const clamp = (place) => Math.max(0, Math.min(count - 1, place));
    const follow = (event) => {
      const box = plot.getBoundingClientRect();
      const under = ((event.clientX - box.left) / box.width) * span;
      if (isMatrix) x = clamp(Math.floor(under));
      else x = places.reduce((best, place, k) => (Math.abs(place - under) < Math.abs(places[best] - under) ? k : best), 0);
      if (isMatrix) y = clamp(Math.floor(((event.clientY - box.top) / box.height) * count));
      show();
    };
    plot.addEventListener("pointermove", follow);
    plot.addEventListener("pointerdown", follow);
    plot.addEventListener("pointerleave", () => { if (document.activeElement !== plot) hide(); });
    plot.addEventListener("focus", show);
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", (event) => {
      if (event.key === "Escape") return hide();
      const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], Home: [-count, 0], End: [count, 0] };
      const move = moves[event.key];
      if (!move || (!isMatrix && move[1]) || event.ctrlKey || event.metaKey || event.altKey) return undefined;
      event.preventDefault();
      x = clamp(x + move[0]);
      y = clamp(y + move[1]);
      return show();
    });
  }

  document.addEventListener("DOMContentLoaded", () => {
    themes(document.getElementById("theme"));
    document.querySelectorAll("table.sortable").forEach(sortable);
    const kinds = { walk, radii };
    document.querySelectorAll("figure[data-chart]").forEach((figure) => (kinds[figure.dataset.chart] || chart)(figure));
    addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => { one.open = true; }));
  });
})();
