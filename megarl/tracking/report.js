"use strict";
// Everything on the page comes from one JSON object. Text is only ever set through textContent, never as markup.
const DATA = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const COLORS = 8;
const state = { smooth: 0.6, hover: null, plots: [] };

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

// A plot redraws itself at its real size. All plots of one stage share the hovered step.
function plotCard(spec, draw, readout) {
  const now = el("div", { class: "now" });
  const node = el("div", { class: "card" + (spec.wide ? " wide" : "") },
    el("div", { class: "head" }, el("h3", { text: spec.title }), now),
    el("p", { class: "hint", text: spec.hint || "" }));
  const legend = el("div", { class: "legend" });
  if (spec.legend) node.append(legend);
  const height = spec.height || 190;
  const root = svg("svg", { class: "plot", height, role: "img" });
  root.append(svg("title", {}, spec.title));
  node.append(root);
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
  root.addEventListener("pointermove", (event) => {
    if (!plot.frame) return;
    state.hover = { stage: spec.stage, x: plot.frame.unscale(event.clientX - root.getBoundingClientRect().left) };
    markAll();
  });
  root.addEventListener("pointerleave", () => { state.hover = null; markAll(); });
  state.plots.push(plot);
  new ResizeObserver(() => plot.redraw()).observe(root);
  return node;
}
let marking = false;
function markAll() {
  if (marking) return;
  marking = true;
  requestAnimationFrame(() => { marking = false; state.plots.forEach((p) => p.mark()); });
}
function redrawAll() { state.plots.forEach((p) => p.redraw()); }

function axes(root, width, height, xs, ys, box) {
  const marks = ticks(ys[0], ys[1], 4), texts = tickTexts(marks);
  box.l = Math.max(44, 14 + 6.4 * Math.max(...texts.map((text) => text.length)));
  const sx = (v) => box.l + ((v - xs[0]) / (xs[1] - xs[0] || 1)) * (width - box.l - box.r);
  const sy = (v) => height - box.b - ((v - ys[0]) / (ys[1] - ys[0] || 1)) * (height - box.t - box.b);
  marks.forEach((t, i) => {
    root.append(svg("line", { class: "gridline", x1: box.l, x2: width - box.r, y1: sy(t), y2: sy(t) }));
    root.append(svg("text", { x: box.l - 7, y: sy(t) + 3.5, "text-anchor": "end" }, texts[i]));
  });
  for (const t of ticks(xs[0], xs[1], Math.max(2, Math.floor(width / 70)))) {
    if (!Number.isInteger(t)) continue;
    root.append(svg("text", { x: inside(sx(t), String(t), width), y: height - 5, "text-anchor": "middle" }, String(t)));
  }
  root.append(svg("line", { class: "axis", x1: box.l, x2: width - box.r, y1: height - box.b, y2: height - box.b }));
  const unscale = (px) => xs[0] + ((px - box.l) / (width - box.l - box.r)) * (xs[1] - xs[0]);
  return { sx, sy, unscale };
}

function lineCard(spec) {
  const box = { l: 44, r: 10, t: 8, b: 22 };
  const all = spec.lines.flatMap((s) => s.y).concat(spec.band ? spec.band.lo.concat(spec.band.hi) : []).filter((v) => v !== null);
  let lo = Math.min(...all), hi = Math.max(...all);
  const pad = (hi - lo) * 0.07 || Math.abs(hi) * 0.1 || 1;
  const ys = [lo >= 0 && lo - pad < 0 ? 0 : lo - pad, hi + pad];
  const xs = spec.range[0] === spec.range[1] ? [spec.range[0] - 1, spec.range[1] + 1] : spec.range;
  spec.legend = spec.lines.length > 1;
  function draw(plot, width, height) {
    const frame = axes(plot.root, width, height, xs, ys, box);
    if (spec.band) {
      const b = spec.band;
      const up = b.x.map((v, i) => `${frame.sx(v).toFixed(1)},${frame.sy(b.hi[i] ?? b.lo[i] ?? ys[0]).toFixed(1)}`);
      const down = b.x.map((v, i) => `${frame.sx(v).toFixed(1)},${frame.sy(b.lo[i] ?? b.hi[i] ?? ys[0]).toFixed(1)}`).reverse();
      plot.root.append(svg("polygon", { points: up.concat(down).join(" "), fill: spec.lines[0].color, opacity: 0.1 }));
    }
    const many = spec.lines.some((s) => s.y.length >= 30), weight = spec.exact ? 0 : state.smooth;
    const unit = Math.max(1, (xs[1] - xs[0]) / 300);
    for (const s of spec.lines) {
      const style = { fill: "none", stroke: s.color, "stroke-linejoin": "round", "stroke-linecap": "round" };
      if (s.dash) style["stroke-dasharray"] = s.dash;
      if (many && weight > 0) {
        plot.root.append(svg("path", { ...style, d: path(s.x, s.y, frame.sx, frame.sy), "stroke-width": 1, opacity: 0.28 }));
      }
      s.shown = many && weight > 0 ? ema(s.x, s.y, weight, unit) : s.y;
      plot.root.append(svg("path", { ...style, d: path(s.x, s.shown, frame.sx, frame.sy), "stroke-width": 1.9 }));
      if (!many) s.x.forEach((v, i) => s.y[i] !== null &&
        plot.root.append(svg("circle", { cx: frame.sx(v), cy: frame.sy(s.y[i]), r: s.y.length > 15 ? 2 : 3, fill: s.color })));
    }
    frame.marks = svg("g", { "pointer-events": "none" });
    plot.root.append(frame.marks);
    return frame;
  }
  function readout(plot, x) {
    const frame = plot.frame;
    frame.marks.replaceChildren();
    const values = spec.lines.map((s) => {
      const i = x === null ? s.x.length - 1 : nearest(s.x, x);
      if (x !== null && s.y[i] !== null) {
        frame.marks.append(svg("line", { class: "cross", x1: frame.sx(s.x[i]), x2: frame.sx(s.x[i]), y1: box.t, y2: plot.height - box.b }));
        frame.marks.append(svg("circle", { cx: frame.sx(s.x[i]), cy: frame.sy(s.y[i]), r: 3.5, fill: s.color, stroke: "var(--card)", "stroke-width": 1.5 }));
      }
      return { step: s.x[i], value: s.y[i] };
    });
    if (spec.legend) {
      plot.legend.replaceChildren(...spec.lines.map((s, i) => key(s.label, s.color, fmt(values[i].value))));
      plot.now.replaceChildren(el("span", { text: `step ${values[0].step}` }));
    } else {
      plot.now.replaceChildren(fmt(values[0].value) + (spec.unit ? ` ${spec.unit}` : ""), el("span", { text: `step ${values[0].step}` }));
    }
  }
  return plotCard(spec, draw, readout);
}
function key(label, tint, value, boxed) {
  return el("span", { class: "key" + (boxed ? " box" : ""), style: `--k:${tint}` }, el("i"), el("span", { text: label }),
    value === undefined ? null : el("b", { text: value }));
}

function stackCard(spec) {
  const box = { l: 44, r: 10, t: 8, b: 22 };
  // At most about 120 bars: neighbouring steps are averaged.
  const per = Math.max(1, Math.ceil(spec.x.length / 120));
  const bars = [];
  for (let i = 0; i < spec.x.length; i += per) {
    const part = spec.parts.map((p) => {
      const v = p.y.slice(i, i + per).filter((n) => n !== null);
      return v.length ? v.reduce((a, b) => a + b, 0) / v.length : 0;
    });
    bars.push({ from: spec.x[i], to: spec.x[Math.min(i + per, spec.x.length) - 1], part });
  }
  const top = Math.max(...bars.map((b) => b.part.reduce((a, v) => a + v, 0))) * 1.05 || 1;
  const xs = [spec.x[0] - 0.5, spec.x[spec.x.length - 1] + 0.5];
  spec.legend = true;
  function draw(plot, width, height) {
    const frame = axes(plot.root, width, height, xs, [0, top], box);
    frame.rects = bars.map((bar) => {
      const x0 = frame.sx(bar.from - 0.5), w = frame.sx(bar.to + 0.5) - x0;
      const group = svg("g");
      let sum = 0;
      bar.part.forEach((v, k) => {
        const y1 = frame.sy(sum), y2 = frame.sy(sum + v);
        sum += v;
        group.append(svg("rect", { x: x0 + w * 0.06, width: Math.max(0.5, w * 0.88), y: y2, height: Math.max(0, y1 - y2), fill: spec.parts[k].color }));
      });
      plot.root.append(group);
      return group;
    });
    return frame;
  }
  function readout(plot, x) {
    const i = x === null ? -1 : nearest(bars.map((b) => (b.from + b.to) / 2), x);
    plot.frame.rects.forEach((r, k) => r.setAttribute("opacity", i < 0 || i === k ? 1 : 0.45));
    const part = i >= 0 ? bars[i].part : spec.parts.map((_, k) => bars.reduce((a, b) => a + b.part[k], 0) / bars.length);
    const sum = part.reduce((a, v) => a + v, 0);
    plot.legend.replaceChildren(...spec.parts.map((p, k) => key(p.label, p.color, `${fmt(part[k])} s · ${Math.round((100 * part[k]) / (sum || 1))}%`, true)));
    plot.now.replaceChildren(`${fmt(sum)} s`, el("span", { text: i < 0 ? "mean" : bars[i].from === bars[i].to ? `step ${bars[i].from}` : `steps ${bars[i].from}–${bars[i].to}` }));
  }
  return plotCard(spec, draw, readout);
}

// One bar per team: its work in its own colour, and what it waited for in the pale colours of the other teams.
function waitsCard(spec) {
  const teams = spec.teams, row = 34, box = { l: 44, r: 14, t: 6, b: 22 };
  const total = (t) => t.waits.reduce((sum, [, s]) => sum + s, t.work);
  const top = Math.max(...teams.map(total)) * 1.02 || 1;
  const place = Object.fromEntries(teams.map((t, i) => [t.name, i]));
  spec.height = box.t + row * teams.length + box.b;
  spec.legend = true;
  function draw(plot, width, height) {
    box.l = Math.min(width / 3, 14 + 7 * Math.max(...teams.map((t) => t.name.length)));
    const sx = (v) => box.l + (v / top) * (width - box.l - box.r);
    const marks = ticks(0, top, 6);
    tickTexts(marks).forEach((text, i) => {
      plot.root.append(svg("line", { class: "gridline", x1: sx(marks[i]), x2: sx(marks[i]), y1: box.t, y2: height - box.b }));
      const shown = `${text} s`;
      plot.root.append(svg("text", { x: inside(sx(marks[i]), shown, width), y: height - 5, "text-anchor": "middle" }, shown));
    });
    teams.forEach((team, i) => {
      const y = box.t + i * row + 5, label = svg("text", { x: box.l - 8, y: y + 16, "text-anchor": "end", class: "name" }, team.name);
      plot.root.append(label);
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
    return { unscale: () => null };
  }
  function readout(plot) {
    plot.legend.replaceChildren(...teams.map((t, i) => key(t.name, color(i), undefined, true)));
    plot.now.replaceChildren(...(spec.bounds ? [el("span", { text: "bounded by" }), ` ${spec.bounds}`] : []));
  }
  return plotCard(spec, draw, readout);
}

function sparkline(series) {
  const root = svg("svg", { viewBox: "0 0 100 30", preserveAspectRatio: "none", "aria-hidden": "true" });
  const y = series.y.filter((v) => v !== null);
  if (y.length < 2) return root;
  const smooth = y.length >= 30 ? ema(y.map((_, i) => i), y, 0.8, 1) : y;
  const lo = Math.min(...smooth), hi = Math.max(...smooth);
  const sx = (i) => (i / (smooth.length - 1)) * 100, sy = (v) => 27 - ((v - lo) / (hi - lo || 1)) * 23;
  const d = path(smooth.map((_, i) => i), smooth, sx, sy);
  root.append(svg("path", { d: `${d}L100,30L0,30Z`, fill: "var(--accent)", opacity: 0.09 }));
  root.append(svg("path", { d, fill: "none", stroke: "var(--accent)", "stroke-width": 1.6, "vector-effect": "non-scaling-stroke" }));
  return root;
}

function header() {
  const run = DATA.runs[0], compare = DATA.runs.length > 1;
  const facts = el("p", { class: "facts" });
  for (const [name, value] of DATA.facts) facts.append(el("span", {}, `${name} `, el("b", { text: value })));
  const tiles = el("div", { class: "tiles" }, ...DATA.tiles.map((t) => {
    const name = el("div", { class: "name", text: t.label + (compare && t.unit ? ` [${t.unit}]` : "") });
    if (compare) return el("div", { class: "tile" }, name, ...[t.last, ...t.others].map((v, i) => el("div", {}, key("", color(i), fmt(v)))));
    const from = el("div", { class: "from" });
    if (t.first !== t.last) {
      const better = t.better && (t.last > t.first) === (t.better === "up");
      const short = (v) => fmt(Number(v.toPrecision(3)));
      from.append(`from ${short(t.first)} `);
      if (t.better) from.append(el("span", { class: better ? "up" : "down", text: (t.last > t.first ? "▲ " : "▼ ") + short(Math.abs(t.last - t.first)) }));
    }
    return el("div", { class: "tile" }, name,
      el("div", { class: "value" }, fmt(t.last), t.unit ? el("small", { text: t.unit }) : null), from, sparkline(t));
  }));
  const top = document.getElementById("top");
  top.append(el("div", { class: "eyebrow", text: compare ? `comparison of ${DATA.runs.length} runs` : "megarl run" }),
    el("div", { class: "titleline" }, el("h1", { text: run.name }), el("span", { class: `pill ${run.status}`, text: run.status })), facts);
  if (compare) top.append(el("div", { class: "legend" }, ...DATA.runs.map((r, i) => key(r.name, color(i)))));
  top.append(tiles);
}

function section(id, title, note, ...children) {
  if (!title.startsWith("Everything else")) document.querySelector("nav .in .tools").before(el("a", { href: `#${id}`, text: title }));
  const node = el("section", { id }, el("h2", {}, title, note ? el("small", { text: note }) : null), ...children);
  document.getElementById("main").append(node);
  return node;
}
function charts() {
  for (const group of DATA.groups) {
    const hero = el("div", { class: "grid hero" }), grid = el("div", { class: "grid" });
    for (const spec of group.charts) {
      const card = spec.kind === "waits" ? waitsCard(spec) : spec.kind === "stack" ? stackCard(tint(spec)) : lineCard(tint(spec));
      (spec.hero ? hero : grid).append(card);
    }
    if (!group.folded) { section(group.id, group.title, group.note, ...[hero, grid].filter((g) => g.children.length)); continue; }
    const fold = el("details", {}, el("summary", {}, `${group.charts.length} charts`, el("small", { text: group.note })), el("div", { class: "inside" }, grid));
    section(group.id, group.title, "", fold);
  }
}
function tint(spec) {
  for (const s of spec.lines || spec.parts) s.color = color(s.tint);
  return spec;
}

function samples() {
  const rows = DATA.samples;
  if (!rows.length) return;
  const steps = [...new Set(rows.map((r) => r.step))];
  const bar = el("div", { class: "bar" }, "step ");
  const body = el("tbody");
  const columns = DATA.sampleColumns;
  function cell(row, name) {
    const value = row[name];
    if (name === "score") {
      const tone = typeof value !== "number" ? "" : value > 0.5 ? " hi" : " lo";
      return el("td", { class: "num" }, el("span", { class: "score" + tone, text: typeof value === "number" ? fmt(value) : "–" }));
    }
    if (typeof value === "number") return el("td", { class: "num", text: fmt(value) });
    if (name === "images") {
      const picture = (n) => (DATA.pictures[n] ? el("img", { src: DATA.pictures[n], alt: n, title: n }) : n);
      return el("td", { class: "images" }, ...(value || []).map(picture));
    }
    if (name === "film") return el("td", {}, value ? el("img", { src: value, alt: "episode" }) : "");
    return el("td", { class: "text" }, el("div", { class: "cut", text: value === null || value === undefined ? "" : String(value) }));
  }
  function show(step) {
    body.replaceChildren(...rows.filter((r) => r.step === step).map((r) => el("tr", {}, ...columns.map((c) => cell(r, c)))));
    for (const b of bar.querySelectorAll("button")) b.setAttribute("aria-pressed", String(Number(b.dataset.step) === step));
  }
  for (const s of steps) bar.append(el("button", { "data-step": s, "aria-pressed": "false", text: s, onclick: () => show(s) }));
  const numeric = (c) => c === "score" || rows.some((r) => typeof r[c] === "number");
  const head = el("tr", {}, ...columns.map((c) => el("th", { class: numeric(c) ? "num" : null, text: c })));
  section("samples", "Samples", DATA.samplesNote, bar, el("div", { class: "table" }, el("table", {}, el("thead", {}, head), body)));
  show(steps[steps.length - 1]);
}

function details() {
  if (DATA.graph) section("graph", "Task graph", "", el("div", { class: "graph" }, el("img", { src: DATA.graph, alt: "task graph" })));
  const pre = el("pre");
  for (const line of DATA.config.split("\n")) {
    const match = /^(\s*(?:- )?)([\w./-]+)(:.*)$/.exec(line);
    if (match) pre.append(match[1], el("span", { class: "k", text: match[2] }), `${match[3]}\n`);
    else pre.append(`${line}\n`);
  }
  const machine = el("table", {}, el("tbody", {}, ...DATA.machine.map(([k, v]) => el("tr", {}, el("td", { text: k }), el("td", { class: "text", text: v })))));
  section("setup", "Setup", "",
    el("details", {}, el("summary", {}, "Configuration", el("small", { text: "resolved, as it ran" })), el("div", { class: "inside" }, pre)),
    el("details", {}, el("summary", { text: "Machine and software" }), el("div", { class: "inside" }, machine)));
}

function tools() {
  const slider = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: state.smooth, "aria-label": "smoothing",
    oninput: (e) => { state.smooth = Number(e.target.value); redrawAll(); } });
  const dark = () => (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const theme = el("button", { text: "light / dark", onclick: () => { document.documentElement.dataset.theme = dark() ? "light" : "dark"; } });
  document.getElementById("nav").append(el("div", { class: "in" }, el("div", { class: "tools" }, el("label", {}, "smoothing ", slider), theme)));
}

header();
tools();
charts();
samples();
details();
