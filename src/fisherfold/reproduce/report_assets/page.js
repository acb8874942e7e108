// The report's script: curves as SVG, sortable tables, light and dark. Kept by hand; needs nothing else.
"use strict";
(() => {
  const NS = "http://www.w3.org/2000/svg";
  const DASHES = ["none", "8 3", "2 3", "10 3 2 3", "14 4"];
  const MARGIN = { left: 64, right: 14, top: 10, bottom: 44 };

  // text goes in as text nodes only, so that no name can become markup
  const make = (parent, tag, attributes = {}, text) => {
    const svg = ["svg", "g", "path", "line", "text", "circle"].includes(tag);
    const node = svg ? document.createElementNS(NS, tag) : document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    if (parent) parent.append(node);
    return node;
  };

  const show = (value) => {
    if (value === null || value === undefined) return "–";
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e5 || size < 1e-3) return value.toExponential(2).replace("e+", "e");
    return String(Number(value.toPrecision(4)));
  };

  const showTick = (value) => show(value).replace(/\.?0+e/, "e");

  const linearTicks = (low, high, count) => {
    const raw = (high - low) / count || 1;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].find((digit) => digit * power >= raw) * power;
    const ticks = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k += 1) ticks.push(Number((k * step).toPrecision(12)));
    return ticks;
  };

  const logTicks = (low, high, count) => {
    const from = Math.ceil(Math.log10(low) - 1e-9);
    const to = Math.floor(Math.log10(high) + 1e-9);
    const skip = Math.max(1, Math.ceil((to - from) / count));
    const ticks = [];
    if (to - from < 2) {
      // less than two decades: 1-2-5 steps, or plain ones where even those are too few
      for (let k = from - 1; k <= to; k += 1) for (const digit of [1, 2, 5]) ticks.push(Number(`${digit}e${k}`));
      const inside = ticks.filter((t) => t >= low * (1 - 1e-9) && t <= high * (1 + 1e-9));
      return inside.length > 2 ? inside : linearTicks(low, high, count);
    }
    for (let k = from; k <= to; k += skip) ticks.push(Number(`1e${k}`));
    return ticks;
  };

  const scale = (values, log, from, to, count) => {
    let low = Math.min(...values);
    let high = Math.max(...values);
    if (!values.length) [low, high] = log ? [1, 10] : [0, 1];
    if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - 0.5, high + 0.5];
    const [a, b] = log ? [Math.log10(low), Math.log10(high)] : [low, high];
    const place = (value) => from + (((log ? Math.log10(value) : value) - a) / (b - a)) * (to - from);
    return { place, ticks: log ? logTicks(low, high, count) : linearTicks(low, high, count) };
  };

  // a method has one pen in all charts of a section; one that is new takes the first that is free
  const pens = (labels, known) => {
    const taken = new Set();
    const take = (n) => { taken.add(n); return n; };
    const own = labels.map((label) => (known.has(label) && !taken.has(known.get(label)) ? take(known.get(label)) : null));
    return labels.map((label, i) => {
      let n = own[i] ?? 0;
      while (own[i] === null && taken.has(n)) n += 1;
      if (!known.has(label)) known.set(label, n);
      return take(n);
    });
  };

  class Chart {
    constructor(host, data, known) {
      this.host = host;
      this.data = data;
      this.pens = pens(data.series.map((series) => series.label), known);
      this.hidden = new Set();
      this.axis = Object.keys(data.axes)[0];
      this.metric = Object.keys(data.metrics)[0];
      this.logX = data.log_x;
      this.logY = data.log_y;
      host.textContent = "";
      this.controls();
      this.plot = make(host, "div", { class: "plot" });
      this.legend();
      this.draw();
      if (window.ResizeObserver) new ResizeObserver(() => this.width() !== this.drawn && this.draw()).observe(this.plot);
    }

    controls() {
      const bar = make(this.host, "div", { class: "bar controls" });
      this.choice(bar, "error", this.data.metrics, (key) => { this.metric = key; });
      this.choice(bar, "horizontal axis", this.data.axes, (key) => { this.axis = key; });
      for (const name of ["logX", "logY"]) {
        const button = make(bar, "button", { type: "button", class: name, "aria-pressed": this[name] }, name === "logX" ? "log x" : "log y");
        button.addEventListener("click", () => {
          this[name] = !this[name];
          button.setAttribute("aria-pressed", this[name]);
          this.draw();
        });
      }
    }

    choice(bar, label, options, change) {
      const keys = Object.keys(options);
      if (keys.length < 2) {
        // a single horizontal axis has its name below the curves already
        if (label === "error") make(bar, "span", { class: "only" }, options[keys[0]]);
        return;
      }
      const select = make(bar, "select", { "aria-label": label, class: label.replace(" ", "-") });
      for (const key of keys) make(select, "option", { value: key }, options[key]);
      select.addEventListener("change", () => { change(select.value); this.draw(); });
    }

    legend() {
      const bar = make(this.host, "div", { class: "bar legend" });
      this.data.series.forEach((series, i) => {
        const button = make(bar, "button", { type: "button", "aria-pressed": "true" });
        const swatch = make(button, "svg", { class: "swatch", viewBox: "0 0 28 8", "aria-hidden": "true" });
        make(swatch, "line", { x1: 0, x2: 28, y1: 4, y2: 4, style: this.pen(i) });
        make(button, "span", {}, series.label);
        button.addEventListener("click", () => {
          if (!this.hidden.delete(i)) this.hidden.add(i);
          button.setAttribute("aria-pressed", !this.hidden.has(i));
          this.draw();
        });
      });
    }

    hue(i) { return `var(--c${this.pens[i] % 7})`; }

    pen(i) { return `stroke: ${this.hue(i)}; stroke-dasharray: ${DASHES[this.pens[i] % DASHES.length]}; stroke-width: ${this.pens[i] ? 2 : 2.8}`; }

    width() { return Math.max(280, Math.round(this.plot.clientWidth) || 640); }

    // points that can be drawn: finite, and positive where an axis is logarithmic
    points() {
      const fine = (value, log) => typeof value === "number" && (!log || value > 0);
      return this.data.series.map((series, i) => {
        if (this.hidden.has(i)) return [];
        const y = series.y[this.metric];
        return series.x[this.axis].flatMap((x, k) => {
          if (!fine(x, this.logX) || !fine(y.median[k], this.logY)) return [];
          const edge = (value) => (fine(value, this.logY) ? value : y.median[k]);
          return [{ x, y: y.median[k], low: edge(y.least[k]), high: edge(y.greatest[k]) }];
        });
      });
    }

    draw() {
      const width = this.width();
      const height = Math.round(Math.min(400, Math.max(260, width * 0.55)));
      this.drawn = width;
      this.plot.textContent = "";
      const svg = make(this.plot, "svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0, "aria-label": `${this.data.metrics[this.metric]} over ${this.data.axes[this.axis]}; arrow keys read the values` });
      const points = this.points();
      const all = points.flat();
      const [right, bottom] = [width - MARGIN.right, height - MARGIN.bottom];
      // an outlier of the first points must not flatten the rest: the linear axis ends at ten times the median
      const heights = all.flatMap((p) => [p.low, p.high, p.y]);
      const ceiling = this.logY ? Infinity : 10 * Math.abs(heights.slice().sort((a, b) => a - b)[heights.length >> 1] || Infinity);
      this.xs = scale(all.map((p) => p.x), this.logX, MARGIN.left, right, width < 500 ? 4 : 8);
      this.ys = scale(heights.filter((v) => v <= ceiling), this.logY, bottom, MARGIN.top, 6);
      this.frame(svg, right, bottom, height);
      const layer = make(svg, "svg", { x: MARGIN.left, y: MARGIN.top - 4, width: right - MARGIN.left + 4, height: bottom - MARGIN.top + 8, viewBox: `${MARGIN.left} ${MARGIN.top - 4} ${right - MARGIN.left + 4} ${bottom - MARGIN.top + 8}` });
      points.forEach((list, i) => this.curve(layer, list, i));
      if (!all.length) make(svg, "text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "nothing to show here");
      this.hover(svg, points, width, bottom);
    }

    frame(svg, right, bottom, height) {
      for (const tick of this.xs.ticks) {
        const x = this.xs.place(tick);
        make(svg, "line", { class: "grid", x1: x, x2: x, y1: MARGIN.top, y2: bottom });
        make(svg, "text", { x, y: bottom + 17, "text-anchor": "middle" }, showTick(tick));
      }
      for (const tick of this.ys.ticks) {
        const y = this.ys.place(tick);
        make(svg, "line", { class: "grid", x1: MARGIN.left, x2: right, y1: y, y2: y });
        make(svg, "text", { x: MARGIN.left - 7, y: y + 4, "text-anchor": "end" }, showTick(tick));
      }
      make(svg, "line", { class: "axis", x1: MARGIN.left, x2: right, y1: bottom, y2: bottom });
      make(svg, "line", { class: "axis", x1: MARGIN.left, x2: MARGIN.left, y1: MARGIN.top, y2: bottom });
      make(svg, "text", { class: "x-label", x: (MARGIN.left + right) / 2, y: height - 7, "text-anchor": "middle" }, this.data.axes[this.axis]);
    }

    curve(svg, list, i) {
      if (!list.length) return;
      const at = (x, y) => `${this.xs.place(x).toFixed(2)},${this.ys.place(y).toFixed(2)}`;
      const upper = list.map((p) => at(p.x, p.high));
      const lower = list.map((p) => at(p.x, p.low)).reverse();
      if (list.some((p) => p.high > p.low)) make(svg, "path", { class: "band", d: `M${[...upper, ...lower].join("L")}Z`, style: `fill: ${this.hue(i)}` });
      make(svg, "path", { class: "curve", d: `M${list.map((p) => at(p.x, p.y)).join("L")}`, style: this.pen(i) });
    }

    // the values nearest to a place, by pointer or, with the chart in focus, by arrow keys from point to point
    hover(svg, points, width, bottom) {
      const mark = make(svg, "g", { class: "mark" });
      let [tip, at] = [null, null];
      const leave = () => { mark.textContent = ""; if (tip) tip.remove(); tip = null; };
      const read = (x) => {
        leave();
        const nearest = points.map((list) => list.reduce((best, p) => (!best || Math.abs(this.xs.place(p.x) - x) < Math.abs(this.xs.place(best.x) - x) ? p : best), null));
        if (!nearest.some(Boolean) || x < MARGIN.left - 8) return;
        make(mark, "line", { class: "cross", x1: x, x2: x, y1: MARGIN.top, y2: bottom });
        tip = make(this.plot, "div", { class: "tip", role: "status" });
        nearest.forEach((p, i) => p && this.line(tip, mark, p, i));
        const left = x > width / 2 ? x - tip.offsetWidth - 14 : x + 14;
        tip.style.left = `${Math.max(0, Math.min(left, width - tip.offsetWidth))}px`;
      };
      svg.addEventListener("pointerleave", leave);
      svg.addEventListener("pointermove", (event) => {
        const box = svg.getBoundingClientRect();
        read(((event.clientX - box.left) / box.width) * width);
      });
      const stops = [...new Set(points.flat().map((p) => this.xs.place(p.x)))].sort((a, b) => a - b);
      const moves = { ArrowRight: () => (at ?? -1) + 1, ArrowLeft: () => (at ?? stops.length) - 1, Home: () => 0, End: () => stops.length - 1 };
      svg.addEventListener("blur", () => { at = null; leave(); });
      svg.addEventListener("keydown", (event) => {
        if (event.key === "Escape") leave();
        if (!(event.key in moves) || !stops.length || event.ctrlKey || event.altKey || event.metaKey) return;
        event.preventDefault();
        at = Math.max(0, Math.min(moves[event.key](), stops.length - 1));
        read(stops[at]);
      });
    }

    line(tip, mark, p, i) {
      make(mark, "circle", { cx: this.xs.place(p.x), cy: this.ys.place(p.y), r: 4, style: `fill: ${this.hue(i)}` });
      const row = make(tip, "div");
      make(row, "i", { style: `background: ${this.hue(i)}` });
      make(row, "b", {}, this.data.series[i].label);
      const spread = p.high > p.low ? ` (${show(p.low)} to ${show(p.high)})` : "";
      row.append(` at ${show(p.x)}: ${show(p.y)}${spread}`);
    }
  }

  const sortable = (table) => {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => head.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((each) => each.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = (row) => row.cells[column].dataset.value ?? null;
      const compare = (a, b) => {
        const [p, q] = [key(a), key(b)];
        if (p !== null && q !== null) return Number(p) - Number(q);
        // what has no number stays below, whichever way it is sorted
        if (p !== null || q !== null) return (p === null ? 1 : -1) * (up ? 1 : -1);
        return a.cells[column].textContent.localeCompare(b.cells[column].textContent);
      };
      const rows = [...table.tBodies[0].rows].sort((a, b) => (up ? 1 : -1) * compare(a, b));
      table.tBodies[0].append(...rows);
    }));
  };

  const theme = (button) => {
    const root = document.documentElement;
    const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
    // a page opened from a file may be refused its storage
    const remember = (value) => { try { localStorage.setItem("fisherfold-theme", value); } catch { /* then it is not kept */ } };
    try { if (["light", "dark"].includes(localStorage.getItem("fisherfold-theme"))) root.dataset.theme = localStorage.getItem("fisherfold-theme"); } catch { /* as above */ }
    const label = () => { button.textContent = dark() ? "light" : "dark"; };
    label();
    button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; remember(root.dataset.theme); label(); });
  };

  theme(document.getElementById("theme"));
  const charts = JSON.parse(document.getElementById("charts").textContent);
  for (const section of document.querySelectorAll("section")) {
    const known = new Map();
    for (const host of section.querySelectorAll(".chart")) new Chart(host, charts[host.dataset.chart], known);
  }
  document.querySelectorAll("table.sortable").forEach(sortable);
})();
