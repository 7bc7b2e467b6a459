"use strict";
// Charts: SVG that redraws itself at its real size. All charts of one stage share the hovered step and the zoom.
// Text is only ever set through textContent, never as markup.
const SVG = "http://www.w3.org/2000/svg";
const COLORS = 8;
const state = { smooth: 0.6, hover: null, zoom: {}, log: new Set(), plots: [] };

function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (value === undefined || value === null) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "text") node.textContent = value;
    else node.setAttribute(key, value);
  }
  for (const child of children) if (child !== null && child !== undefined) node.append(child);
  return node;
}
function svg(tag, attrs = {}, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attrs)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}
const color = (i) => `var(--c${i % COLORS})`;

function fmt(v) {
  if (v === null || v === undefined || !Number.isFinite(v)) return "–";
  const a = Math.abs(v);
  if (a >= 1e9) return (v / 1e9).toPrecision(3) + "G";
  if (a >= 1e6) return (v / 1e6).toPrecision(3) + "M";
  if (a >= 1e4) return (v / 1e3).toPrecision(3) + "k";
  if (a > 0 && a < 1e-3) return v.toExponential(1);
  return String(Number(v.toPrecision(4)));
}
function fmtSeconds(s) {
  if (s < 90) return `${s.toFixed(s < 10 ? 1 : 0)} s`;
  const m = Math.round(s / 60);
  return m < 90 ? `${m} min` : `${Math.floor(m / 60)} h ${m % 60} min`;
}
function ticks(lo, hi, count) {
  const raw = (hi - lo) / Math.max(1, count);
  const power = Math.pow(10, Math.floor(Math.log10(raw)));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const out = [];
  for (let t = Math.ceil(lo / step - 1e-9) * step; t <= hi + step * 1e-9; t += step) out.push(Math.abs(t) < step * 1e-9 ? 0 : t);
  return out;
}
// Marks of a logarithmic axis: powers of ten, with 2 and 5 between them where these are few, else evenly spaced values.
function logTicks(lo, hi) {
  const out = [], decades = Math.log10(hi / lo), every = Math.max(1, Math.ceil(decades / 6));
  for (let p = Math.floor(Math.log10(lo)); p <= Math.ceil(Math.log10(hi)); p++) {
    if (p % every) continue;
    for (const m of decades > 3 ? [1] : [1, 2, 5]) out.push(m * Math.pow(10, p));
  }
  const inside = out.filter((t) => t >= lo * (1 - 1e-9) && t <= hi * (1 + 1e-9));
  return inside.length > 1 ? inside : ticks(lo, hi, 4).filter((t) => t > 0);
}
// Texts of the marks of an axis: as many digits as it takes to tell neighbours apart.
function tickTexts(values) {
  const top = Math.max(...values.map(Math.abs)), step = values.length > 1 ? Math.abs(values[1] - values[0]) : top;
  const [scale, unit] = top >= 1e9 ? [1e9, "G"] : top >= 1e6 ? [1e6, "M"] : top >= 1e4 ? [1e3, "k"] : [1, ""];
  const write = (v, digits) => (top > 0 && top < 1e-3 ? v.toExponential(digits) : (v / scale).toFixed(digits));
  let digits = 0;
  while (digits < 12 && values.some((v) => Math.abs(Number(write(v, digits)) * scale - v) > step * 1e-3)) digits++;
  return values.map((v) => (v === 0 ? "0" : write(v, digits) + unit));
}
// A running mean whose weights fall with the distance in steps, so that a point counts as much in a long run, of which
// fewer points are kept, as in a short one beside it. `unit`: steps that take one factor of `weight`. Gaps stay gaps.
function ema(x, y, weight, unit) {
  let total = 0, norm = 0, last = null;
  return y.map((v, i) => {
    if (v === null) return null;
    const fade = last === null ? 0 : Math.pow(weight, (x[i] - last) / unit);
    last = x[i];
    total = total * fade + v;
    norm = norm * fade + 1;
    return total / norm;
  });
}
// The range of values that an axis shows. A few outliers at an end (one value in fifty, at least one) that would take
// more than two thirds of it are left out, and marked at its edge: most often the first step, which compiles.
function axisRange(values) {
  const sorted = [...values].sort((a, b) => a - b), n = sorted.length;
  let lo = sorted[0], hi = sorted[n - 1];
  if (n < 6) return [lo, hi];
  const out = Math.ceil(n / 50), near = [sorted[out], sorted[n - 1 - out]];
  const spread = Math.max(near[1] - near[0], 0.05 * Math.max(Math.abs(near[0]), Math.abs(near[1])));
  if (spread > 0 && hi - near[1] > 2 * spread) hi = near[1];
  if (spread > 0 && near[0] - lo > 2 * spread) lo = near[0];
  return [lo, hi];
}
// Where the middle of a text of an axis is, so that it ends inside of the drawing.
function inside(center, text, width) {
  const half = 3.4 * text.length + 1;
  return Math.max(half, Math.min(center, width - half));
}
function nearest(x, value) {
  let best = 0;
  for (let i = 1; i < x.length; i++) if (Math.abs(x[i] - value) < Math.abs(x[best] - value)) best = i;
  return best;
}
function path(x, y, sx, sy) {
  let d = "", open = false;
  x.forEach((v, i) => {
    if (y[i] === null) { open = false; return; }
    d += `${open ? "L" : "M"}${sx(v).toFixed(1)},${sy(y[i]).toFixed(1)}`;
    open = true;
  });
  return d;
}

// A card with a title, a read-out, a legend and a plot. `draw` returns the frame of the plot: its scales and marks.
function plotCard(spec, draw, readout, ...buttons) {
  const now = el("div", { class: "now" }), legend = el("div", { class: "legend" }), height = spec.height || 200;
  const root = svg("svg", { class: "plot", height, role: "img" });
  root.append(svg("title", {}, spec.title));
  const node = el("div", { class: "card" + (spec.wide ? " wide" : "") },
    el("div", { class: "head" }, el("h3", { text: spec.title }), now),
    el("div", { class: "head hint" }, el("span", { text: spec.hint || "" }), el("span", { class: "small" }, ...buttons)),
    spec.legend ? legend : null, root);
  const plot = { root, height, stage: spec.stage, frame: null, legend, now,
    redraw() {
      const width = root.clientWidth;
      if (!width) return;
      root.setAttribute("viewBox", `0 0 ${width} ${height}`);
      root.replaceChildren(root.firstChild);
      plot.frame = draw(plot, width, height);
      plot.mark();
    },
    mark() { if (plot.frame) readout(plot, state.hover && state.hover.stage === spec.stage ? state.hover.x : null); } };
  if (spec.range) zooming(plot, spec);
  state.plots.push(plot);
  new ResizeObserver(() => plot.redraw()).observe(root);
  return node;
}
// Moving shows a step in all charts of the stage, dragging shows a part of its steps, and a double click all of them.
function zooming(plot, spec) {
  let from = null;
  const place = (event) => event.clientX - plot.root.getBoundingClientRect().left;
  const area = svg("rect", { class: "area", y: 0, height: plot.height });
  const end = () => { from = null; area.remove(); };
  plot.root.addEventListener("pointerdown", (event) => { if (event.button === 0) from = place(event); });
  plot.root.addEventListener("pointermove", (event) => {
    if (!plot.frame) return;
    const px = place(event);
    state.hover = { stage: spec.stage, x: plot.frame.unscale(px) };
    if (from !== null && Math.abs(px - from) > 6) {
      area.setAttribute("x", Math.min(px, from));
      area.setAttribute("width", Math.abs(px - from));
      plot.root.append(area);
    }
    markAll();
  });
  plot.root.addEventListener("pointerup", (event) => {
    const px = place(event), was = from;
    end();
    if (was === null || Math.abs(px - was) <= 6) return;
    const ends = [plot.frame.unscale(Math.min(px, was)), plot.frame.unscale(Math.max(px, was))];
    zoom(spec.stage, ends[1] - ends[0] < 2 ? [ends[0] - 1, ends[1] + 1] : ends);
  });
  plot.root.addEventListener("dblclick", () => zoom(spec.stage, null));
  for (const kind of ["pointerleave", "pointercancel"]) {
    plot.root.addEventListener(kind, () => { end(); state.hover = null; markAll(); });
  }
}
function zoom(stage, ends) {
  if (ends) state.zoom[stage] = ends;
  else delete state.zoom[stage];
  const reset = document.getElementById("reset");
  if (reset) reset.hidden = !Object.keys(state.zoom).length;
  redrawAll();
}
let marking = false;
function markAll() {
  if (marking) return;
  marking = true;
  requestAnimationFrame(() => { marking = false; state.plots.forEach((p) => p.mark()); });
}
function redrawAll() { state.plots.forEach((p) => p.redraw()); }

// The axes with their marks and titles. `xs`, `ys`: their ends; `before`: steps before which marks mean nothing.
function axes(root, width, height, xs, ys, box, spec, log, before) {
  const marks = log ? logTicks(ys[0], ys[1]) : ticks(ys[0], ys[1], 4);
  const texts = log ? marks.map((v) => fmt(v)) : tickTexts(marks);
  box.l = Math.max(44, 14 + 6.4 * Math.max(...texts.map((text) => text.length)));
  const scale = log ? Math.log10 : (v) => v, [low, high] = ys.map(scale);
  const sx = (v) => box.l + ((v - xs[0]) / (xs[1] - xs[0] || 1)) * (width - box.l - box.r);
  const sy = (v) => height - box.b - ((scale(v) - low) / (high - low || 1)) * (height - box.t - box.b);
  marks.forEach((t, i) => {
    root.append(svg("line", { class: "gridline", x1: box.l, x2: width - box.r, y1: sy(t), y2: sy(t) }));
    root.append(svg("text", { x: box.l - 7, y: sy(t) + 3.5, "text-anchor": "end" }, texts[i]));
  });
  let last = -Infinity;
  for (const t of ticks(xs[0], xs[1], Math.max(2, Math.floor(width / 80)))) {
    if (!Number.isInteger(t) || t < before) continue;
    const text = String(t), at = inside(sx(t), text, width);
    if (at - 3.4 * text.length < last + 4) continue;
    last = at + 3.4 * text.length;
    root.append(svg("text", { x: at, y: height - 18, "text-anchor": "middle" }, text));
  }
  root.append(svg("line", { class: "axis", x1: box.l, x2: width - box.r, y1: height - box.b, y2: height - box.b }));
  root.append(svg("text", { class: "title", x: 1, y: 10 }, (spec.unit || "value") + (log ? ", logarithmic" : "")));
  root.append(svg("text", { class: "title", x: width - box.r, y: height - 4, "text-anchor": "end" }, "step"));
  const unscale = (px) => xs[0] + ((px - box.l) / (width - box.l - box.r)) * (xs[1] - xs[0]);
  return { sx, sy, unscale };
}
function frameBox() { return { l: 44, r: 10, t: 20, b: 33 }; }
function ends(spec) {
  return state.zoom[spec.stage] || [spec.range[0], spec.range[1]].map((v, i) => (spec.range[0] === spec.range[1] ? v + 2 * i - 1 : v));
}

// Points of a line with those of the supervised start before them, squeezed into a quarter of the axis.
function withStart(line, spec) {
  if (!spec.start) return { ...line, name: line.x.map((x) => `step ${x}`), stages: line.x.map(() => spec.stage), steps: line.x };
  const before = line.start || { x: [], y: [] };
  return { ...line, x: [...before.x.map((v) => spec.start.to - ((spec.start.steps - v) / spec.start.steps) * spec.start.width), ...line.x],
    y: [...before.y, ...line.y], steps: [...before.x, ...line.x],
    stages: [...before.x.map(() => "sft"), ...line.x.map(() => spec.stage)],
    name: [...before.x.map((x) => `start, step ${x}`), ...line.x.map((x) => `step ${x}`)] };
}
function startOf(spec) {
  const steps = Math.max(0, ...spec.lines.flatMap((s) => (s.start ? s.start.x : [])));
  if (!steps) return null;
  const to = Math.min(spec.range[0], Math.max(0, spec.range[0] - 1));
  return { steps, to, width: Math.min(steps, Math.max(1, (spec.range[1] - to) / 3)) };
}
function between(x, xs) { return x >= xs[0] && x <= xs[1]; }

// The shown part of a chart as text: stage, step, and a column per line.
function csvOf(spec) {
  const table = new Map(), quote = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const limits = state.zoom[spec.stage] || [-Infinity, Infinity];
  spec.lines.forEach((s, k) => s.x.forEach((x, i) => {
    if (!between(x, limits)) return;
    const id = `${s.stages[i]},${s.steps[i]}`;
    if (!table.has(id)) table.set(id, { x, values: spec.lines.map(() => "") });
    table.get(id).values[k] = s.y[i] ?? "";
  }));
  const rows = [...table].sort((a, b) => a[1].x - b[1].x).map(([id, row]) => [id, ...row.values].join(","));
  return [["stage", "step", ...spec.lines.map((s) => quote(s.label))].join(","), ...rows].join("\n") + "\n";
}
function csvButton(spec) {
  return el("button", { class: "link", text: "csv", title: "save what is shown", onclick: () => {
    const address = URL.createObjectURL(new Blob([csvOf(spec)], { type: "text/csv" }));
    el("a", { href: address, download: `${spec.title.replace(/[^\w.-]+/g, "_")}.csv` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  } });
}

function lineCard(spec) {
  const box = frameBox(), id = `${spec.stage}/${spec.title}`, clip = `clip${state.plots.length}`;
  spec.start = startOf(spec);
  spec.lines = spec.lines.map((s) => withStart(s, spec));
  spec.legend = spec.lines.length > 1;
  const positive = spec.lines.some((s) => s.y.some((v) => v > 0));
  const logButton = el("button", { class: "link", text: "log", title: "logarithmic axis", "aria-pressed": String(state.log.has(id)), onclick: () => {
    if (!state.log.delete(id)) state.log.add(id);
    logButton.setAttribute("aria-pressed", String(state.log.has(id)));
    redrawAll();
  } });
  function limits(xs, log) {
    const all = spec.lines.flatMap((s) => s.y.filter((_, i) => between(s.x[i], xs)));
    if (spec.band) spec.band.x.forEach((x, i) => { if (between(x, xs)) all.push(spec.band.lo[i], spec.band.hi[i]); });
    const values = all.filter((v) => v !== null && v !== undefined && (!log || v > 0));
    if (!values.length) return log ? [0.1, 1] : [0, 1];
    if (log) return [Math.min(...values) / 1.1, Math.max(...values) * 1.1];
    const [lo, hi] = axisRange(values), pad = (hi - lo) * 0.07 || Math.abs(hi) * 0.1 || 1;
    return [lo >= 0 && lo - pad < 0 ? 0 : lo - pad, hi + pad];
  }
  function draw(plot, width, height) {
    const log = positive && state.log.has(id), xs = ends(spec);
    if (spec.start && !state.zoom[spec.stage]) xs[0] = spec.start.to - spec.start.width;
    const ys = limits(xs, log);
    const frame = axes(plot.root, width, height, xs, ys, box, spec, log, spec.start ? spec.start.to : -Infinity);
    const sy = (v) => frame.sy(log ? Math.max(v, ys[0]) : v), shownY = (v) => (log && !(v > 0) ? null : v);
    plot.root.append(svg("clipPath", { id: clip }));
    plot.root.lastChild.append(svg("rect", { x: box.l, y: box.t - 4, width: width - box.l - box.r + 4, height: height - box.t - box.b + 6 }));
    const inner = svg("g", { "clip-path": `url(#${clip})` });
    if (spec.start && xs[0] < spec.start.to) shadeStart(plot.root, frame, xs, height);
    plot.root.append(inner);
    if (spec.band) {
      const b = spec.band;
      const up = b.x.map((v, i) => `${frame.sx(v).toFixed(1)},${sy(b.hi[i] ?? b.lo[i] ?? ys[0]).toFixed(1)}`);
      const down = b.x.map((v, i) => `${frame.sx(v).toFixed(1)},${sy(b.lo[i] ?? b.hi[i] ?? ys[0]).toFixed(1)}`).reverse();
      inner.append(svg("polygon", { points: up.concat(down).join(" "), fill: spec.lines[0].color, opacity: 0.1 }));
    }
    const many = spec.lines.some((s) => s.y.length >= 30), weight = spec.exact ? 0 : state.smooth;
    const unit = Math.max(1, (xs[1] - xs[0]) / 300);
    for (const s of spec.lines) {
      const style = { fill: "none", stroke: s.color, "stroke-linejoin": "round", "stroke-linecap": "round" };
      if (s.dash) style["stroke-dasharray"] = s.dash;
      const raw = s.y.map(shownY), smooth = many && weight > 0 ? ema(s.x, raw, weight, unit) : raw;
      if (smooth !== raw) inner.append(svg("path", { ...style, d: path(s.x, raw, frame.sx, sy), "stroke-width": 1, opacity: 0.28 }));
      inner.append(svg("path", { ...style, d: path(s.x, smooth, frame.sx, sy), "stroke-width": 1.9 }));
      s.x.forEach((v, i) => {
        if (raw[i] === null || !between(v, xs)) return;
        if (raw[i] > ys[1] || raw[i] < ys[0]) outlier(plot.root, s, frame.sx(v), raw[i] > ys[1], raw[i], s.name[i]);
        else if (!many) inner.append(svg("circle", { cx: frame.sx(v), cy: sy(raw[i]), r: s.y.length > 15 ? 2 : 3, fill: s.color }));
      });
    }
    frame.ys = ys;
    frame.marks = svg("g", { "pointer-events": "none" });
    plot.root.append(frame.marks);
    return frame;
  }
  function outlier(root, s, x, above, value, name) {
    const y = above ? box.t + 4 : root.viewBox.baseVal.height - box.b - 4, tip = above ? -6 : 6;
    const mark = svg("path", { class: "outlier", d: `M${x - 4},${y}L${x + 4},${y}L${x},${y + tip}Z`, fill: s.color });
    mark.append(svg("title", {}, `${fmt(value)} at ${name}`));
    root.append(mark);
  }
  function shadeStart(root, frame, xs, height) {
    const x = Math.max(box.l, frame.sx(xs[0])), room = frame.sx(spec.start.to) - x;
    root.append(svg("rect", { class: "start", x, y: box.t - 4, width: room, height: height - box.t - box.b + 4 }));
    const text = [`supervised start, ${spec.start.steps} steps`, "supervised start", "start"].find((t) => 6.2 * t.length < room);
    if (text) root.append(svg("text", { x: x + room / 2, y: height - 18, "text-anchor": "middle" }, text));
  }
  function readout(plot, x) {
    const frame = plot.frame, xs = ends(spec), within = x === null ? null : x;
    frame.marks.replaceChildren();
    const found = spec.lines.map((s) => {
      const i = within !== null ? nearest(s.x, within) : state.zoom[spec.stage] ? nearest(s.x, xs[1]) : s.x.length - 1;
      if (within !== null && s.y[i] !== null && s.y[i] >= frame.ys[0] && s.y[i] <= frame.ys[1]) {
        frame.marks.append(svg("line", { class: "cross", x1: frame.sx(s.x[i]), x2: frame.sx(s.x[i]), y1: box.t, y2: plot.height - box.b }));
        frame.marks.append(svg("circle", { cx: frame.sx(s.x[i]), cy: frame.sy(s.y[i]), r: 3.5, fill: s.color, stroke: "var(--card)", "stroke-width": 1.5 }));
      }
      return { name: s.name[i], value: s.y[i] };
    });
    plot.now.replaceChildren(...(spec.legend ? [] : [fmt(found[0].value)]), el("span", { text: found[0].name }));
    if (spec.legend) plot.legend.replaceChildren(...spec.lines.map((s, i) => key(s.label, s.color, fmt(found[i].value), s.dash)));
  }
  return plotCard(spec, draw, readout, positive ? logButton : null, csvButton(spec));
}
// An entry of a legend: a line as it is drawn, or a box for parts of a bar.
function key(label, tint, value, dash, boxed) {
  const mark = svg("svg", { width: boxed ? 10 : 20, height: 10, "aria-hidden": "true" });
  if (boxed) mark.append(svg("rect", { width: 10, height: 10, rx: 3, fill: tint }));
  else mark.append(svg("line", { x1: 1, x2: 19, y1: 5, y2: 5, stroke: tint, "stroke-width": 2.4, "stroke-dasharray": dash || "none" }));
  return el("span", { class: "key" }, mark, el("span", { text: label }), value === undefined ? null : el("b", { text: value }));
}

function stackCard(spec) {
  const box = frameBox();
  for (const line of spec.lines) Object.assign(line, { x: spec.x, steps: spec.x, stages: spec.x.map(() => spec.stage) });
  spec.legend = true;
  // At most about 120 bars: neighbouring steps are averaged.
  function barsOf(xs) {
    const shown = spec.x.map((_, i) => i).filter((i) => between(spec.x[i], xs)), bars = [];
    const per = Math.max(1, Math.ceil(shown.length / 120));
    for (let i = 0; i < shown.length; i += per) {
      const steps = shown.slice(i, i + per);
      const part = spec.lines.map((p) => steps.reduce((sum, k) => sum + p.y[k], 0) / steps.length);
      bars.push({ from: spec.x[steps[0]], to: spec.x[steps[steps.length - 1]], part });
    }
    return bars;
  }
  const height = (bar) => bar.part.reduce((a, v) => a + v, 0);
  function draw(plot, width, full) {
    const xs = ends(spec), bars = barsOf(xs), top = (bars.length ? axisRange(bars.map(height))[1] : 0) * 1.05 || 1;
    const frame = axes(plot.root, width, full, [xs[0] - 0.5, xs[1] + 0.5], [0, top], box, spec, false, -Infinity);
    frame.bars = bars;
    frame.groups = bars.map((bar) => {
      const x0 = frame.sx(bar.from - 0.5), w = frame.sx(bar.to + 0.5) - x0, group = svg("g");
      let sum = 0;
      bar.part.forEach((v, k) => {
        const y1 = frame.sy(Math.min(sum, top)), y2 = frame.sy(Math.min(sum + v, top));
        sum += v;
        group.append(svg("rect", { x: x0 + w * 0.06, width: Math.max(0.5, w * 0.88), y: y2, height: Math.max(0, y1 - y2), fill: spec.lines[k].color }));
      });
      if (sum > top) {
        const x = x0 + w / 2;
        group.append(svg("path", { class: "outlier", d: `M${x - 4},${box.t + 4}L${x + 4},${box.t + 4}L${x},${box.t - 2}Z`, fill: "var(--faint)" }));
        group.lastChild.append(svg("title", {}, `${fmt(sum)} s at step ${bar.from}`));
      }
      plot.root.append(group);
      return group;
    });
    return frame;
  }
  function readout(plot, x) {
    const { bars, groups } = plot.frame;
    const i = x === null || !bars.length ? -1 : nearest(bars.map((b) => (b.from + b.to) / 2), x);
    groups.forEach((r, k) => r.setAttribute("opacity", i < 0 || i === k ? 1 : 0.45));
    const part = i >= 0 ? bars[i].part : spec.lines.map((_, k) => bars.reduce((a, b) => a + b.part[k], 0) / (bars.length || 1));
    const sum = part.reduce((a, v) => a + v, 0);
    plot.legend.replaceChildren(...spec.lines.map((p, k) => key(p.label, p.color, `${fmt(part[k])} s · ${Math.round((100 * part[k]) / (sum || 1))}%`, "", true)));
    plot.now.replaceChildren(`${fmt(sum)} s`, el("span", { text: i < 0 ? "mean" : bars[i].from === bars[i].to ? `step ${bars[i].from}` : `steps ${bars[i].from}–${bars[i].to}` }));
  }
  return plotCard(spec, draw, readout, csvButton(spec));
}

// One bar per team: its work in its own colour, and what it waited for in the pale colours of the other teams.
function waitsCard(spec) {
  const teams = spec.teams, row = 34, box = { l: 44, r: 14, t: 6, b: 36 };
  const total = (t) => t.waits.reduce((sum, [, s]) => sum + s, t.work);
  const top = Math.max(...teams.map(total)) * 1.02 || 1;
  const place = Object.fromEntries(teams.map((t, i) => [t.name, i]));
  spec.height = box.t + row * teams.length + box.b;
  spec.legend = true;
  function draw(plot, width, height) {
    box.l = Math.min(width / 3, 14 + 7 * Math.max(...teams.map((t) => t.name.length)));
    const sx = (v) => box.l + (v / top) * (width - box.l - box.r);
    const marks = ticks(0, top, width < 500 ? 3 : 6);
    tickTexts(marks).forEach((text, i) => {
      plot.root.append(svg("line", { class: "gridline", x1: sx(marks[i]), x2: sx(marks[i]), y1: box.t, y2: height - box.b }));
      plot.root.append(svg("text", { x: inside(sx(marks[i]), text, width), y: height - 20, "text-anchor": "middle" }, text));
    });
    plot.root.append(svg("text", { class: "title", x: width - box.r, y: height - 4, "text-anchor": "end" }, spec.unit));
    teams.forEach((team, i) => {
      const y = box.t + i * row + 5, room = Math.floor((box.l - 10) / 6.8);
      const name = team.name.length > room ? `${team.name.slice(0, room - 1)}…` : team.name;
      plot.root.append(svg("text", { x: box.l - 8, y: y + 16, "text-anchor": "end", class: "name" }, name));
      let from = 0;
      const parts = [[team.name, team.work, 1], ...team.waits.map(([other, s]) => [other, s, 0.32])];
      for (const [name, s, opacity] of parts) {
        const width = sx(from + s) - sx(from);
        const what = opacity === 1 ? `${team.name} at work: ${fmtSeconds(s)}` : `${team.name} waiting for ${name}: ${fmtSeconds(s)}`;
        const rect = svg("rect", { x: sx(from), y, width: Math.max(0, width - 1), height: row - 10, rx: 3, fill: color(place[name]), opacity });
        rect.append(svg("title", {}, what));
        plot.root.append(rect);
        const text = opacity === 1 ? fmtSeconds(s) : `for ${name} ${fmtSeconds(s)}`;
        if (width > 12 + 6.6 * text.length) {
          plot.root.append(svg("text", { x: sx(from) + 7, y: y + 16, class: opacity === 1 ? "inverse" : "name", "pointer-events": "none" }, text));
        }
        from += s;
      }
    });
    return {};
  }
  function readout(plot) {
    plot.legend.replaceChildren(...teams.map((t, i) => key(t.name, color(i), undefined, "", true)));
    plot.now.replaceChildren(...(spec.bounds ? [el("span", { text: "bounded by" }), ` ${spec.bounds}`] : []));
  }
  return plotCard(spec, draw, readout);
}

function sparkline(values) {
  const root = svg("svg", { viewBox: "0 0 100 30", preserveAspectRatio: "none", "aria-hidden": "true" });
  const y = values.filter((v) => v !== null);
  if (y.length < 2) return root;
  const smooth = y.length >= 30 ? ema(y.map((_, i) => i), y, 0.8, 1) : y;
  const [lo, hi] = axisRange(smooth);
  const sx = (i) => (i / (smooth.length - 1)) * 100;
  const sy = (v) => 27 - ((Math.max(lo, Math.min(hi, v)) - lo) / (hi - lo || 1)) * 23;
  const d = path(smooth.map((_, i) => i), smooth, sx, sy);
  root.append(svg("path", { d: `${d}L100,30L0,30Z`, fill: "var(--accent)", opacity: 0.09 }));
  root.append(svg("path", { d, fill: "none", stroke: "var(--accent)", "stroke-width": 1.6, "vector-effect": "non-scaling-stroke" }));
  return root;
}
