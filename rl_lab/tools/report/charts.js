// Draws the plots of a report. The curves are in #chart-data and plotly.js is in #chart-library, both compressed.
"use strict";
(() => {
const nonce = document.currentScript.nonce;
const BAND_DRAWS = 500, BAND_POINTS = 200, LEVEL = 0.95;
const TRAINING = "collect/return_mean", EVALUATION = "eval/return_mean", SPREAD = "eval/return_std";
const UNITS = [["seconds", 1, 180], ["minutes", 60, 180 * 60], ["hours", 3600, Infinity]];
const one = (selector, root = document) => root.querySelector(selector);
const all = (selector, root = document) => [...root.querySelectorAll(selector)];

let data = null;
const place = "rl-lab report " + location.pathname;
const state = { x: "step", smooth: 5, log: false, seeds: "mean", hidden: [], search: "", ...saved() };

function saved() {
  try { return JSON.parse(sessionStorage.getItem(place)) || {}; } catch { return {}; }
}
function remember() {
  try { sessionStorage.setItem(place, JSON.stringify(state)); } catch { /* a private window */ }
}

async function unpack(id) {
  const bytes = Uint8Array.from(atob(one("#" + id).textContent), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

// --- Curves ---

function curve(run, key) {
  const found = run.y[key];
  if (!found) return { x: [], y: [] };
  const [lines, values] = found, counter = run.x[state.x], x = [], y = [];
  for (let i = 0; i < values.length; i++) {
    const at = counter[lines ? lines[i] : i];
    if (at === null || values[i] === null) continue;
    if (x.length && at <= x[x.length - 1]) y[y.length - 1] = values[i];  // of one count the last value
    else { x.push(at); y.push(values[i]); }
  }
  return { x, y };
}

function smooth({ x, y }, percent) {
  const half = Math.floor(y.length * percent / 200);
  if (half < 1) return { x, y };
  const sums = [0];
  for (const value of y) sums.push(sums[sums.length - 1] + value);
  return { x, y: y.map((_, i) => {
    const low = Math.max(0, i - half), high = Math.min(y.length, i + half + 1);
    return (sums[high] - sums[low]) / (high - low);
  }) };
}

function valuesAt({ x, y }, grid) {
  let i = 0;
  return grid.map((at) => {
    while (i < x.length - 2 && x[i + 1] < at) i++;
    if (x.length === 1 || at <= x[0]) return y[0];
    if (at >= x[x.length - 1]) return y[y.length - 1];
    return y[i] + (y[i + 1] - y[i]) * (at - x[i]) / (x[i + 1] - x[i]);
  });
}

function random(seed) {  // a linear congruential generator: the same page shows the same band
  return (limit) => { seed = (Math.imul(seed, 1664525) + 1013904223) >>> 0; return Math.floor(seed / 4294967296 * limit); };
}

// Mean over seeds and its bootstrap interval, over the range that all of them cover.
function band(curves) {
  curves = curves.filter((item) => item.x.length);
  if (!curves.length) return null;
  const start = Math.max(...curves.map((item) => item.x[0]));
  const end = Math.min(...curves.map((item) => item.x[item.x.length - 1]));
  if (start > end) return null;
  let x = [...new Set(curves.flatMap((item) => item.x))].filter((at) => at >= start && at <= end).sort((a, b) => a - b);
  if (x.length > BAND_POINTS)
    x = Array.from({ length: BAND_POINTS }, (_, i) => start + (end - start) * i / (BAND_POINTS - 1));
  const rows = curves.map((item) => valuesAt(item, x)), n = rows.length;
  const mean = x.map((_, i) => rows.reduce((sum, row) => sum + row[i], 0) / n);
  if (n === 1) return { x, mean, low: mean, high: mean };
  const draw = random(1), picks = Array.from({ length: BAND_DRAWS }, () => rows.map(() => draw(n)));
  const low = [], high = [], tail = (1 - LEVEL) / 2;
  for (let i = 0; i < x.length; i++) {
    const drawn = Float64Array.from(picks, (pick) => pick.reduce((sum, row) => sum + rows[row][i], 0) / n).sort();
    low.push(drawn[Math.floor(tail * (BAND_DRAWS - 1))]);
    high.push(drawn[Math.ceil((1 - tail) * (BAND_DRAWS - 1))]);
  }
  return { x, mean, low, high };
}

// --- Traces ---

const paint = (color, alpha) => color + Math.round(alpha * 255).toString(16).padStart(2, "0");
const sparse = (key) => key.startsWith("eval/") || key.startsWith("report/");
const short = (text, length = 34) => text.length > length ? text.slice(0, length - 1) + "…" : text;

// A run's name without the words that all of them begin with: legends are narrow.
function brief(name) {
  const words = data.runs.map((run) => run.group.split(" "));
  let same = 0;
  while (new Set(words.map((list) => list[same])).size === 1 && words.every((list) => list.length > same + 1)) same++;
  return short(name.split(" ").slice(same).join(" "));
}

function line(x, y, name, color, more = {}) {
  const { width = 1.8, opacity = 1, ...rest } = more;
  return { type: "scatter", mode: "lines", x, y, name, line: { color, width }, opacity,
    hovertemplate: "%{y:.5~g}<extra>%{fullData.name}</extra>", showlegend: false, ...rest };
}
const quiet = { hoverinfo: "skip", hovertemplate: null };

function area(x, low, high, color) {
  return { ...line([...x, ...x.slice().reverse()], [...high, ...low.slice().reverse()], "", color, quiet),
    fill: "toself", fillcolor: paint(color, 0.16), line: { width: 0 } };
}

function shown(task) {
  return data.runs.filter((run) => !state.hidden.includes(run.label) && (task === null || run.task === task));
}

function groups(runs) {
  const found = new Map();
  for (const run of runs) found.set(run.group, [...(found.get(run.group) || []), run]);
  return found;
}

function tracesOf(spec) {
  const traces = [], { keys, task = null, large } = spec;
  const learning = keys.length === 2 && keys[1] === EVALUATION;
  const runs = shown(task);
  const together = [...groups(runs)].flatMap(([group, members]) =>
    state.seeds === "mean" && members.length > 1 ? [[`${group} (${members.length} seeds)`, members]]
      : members.map((run) => [run.label, [run]]));
  for (const [name, members] of together) for (const key of keys) {
    const color = members[0].color;
    const evaluation = learning && key === EVALUATION;
    const faint = learning && !evaluation && members.some((run) => run.y[EVALUATION]);
    const whose = learning ? `${brief(name)}, ${evaluation ? "evaluation" : "training"}` : data.runs.length > 1 ? brief(name) : keys[0];
    const raw = members.map((run) => curve(run, key));
    const curves = raw.map((item) => sparse(key) ? item : smooth(item, state.smooth));
    if (!curves.some((item) => item.x.length)) continue;
    const few = Math.max(...curves.map((item) => item.x.length)) <= 60;
    const look = evaluation || sparse(key) || Math.max(...curves.map((item) => item.x.length)) < 2
      ? { mode: few ? "lines+markers" : "lines", marker: { size: large ? 6 : 4 }, width: evaluation ? 2.4 : 1.8 }
      : { opacity: faint ? 0.65 : 1, width: faint ? 1.3 : 1.8 };
    if (members.length === 1) {
      if (state.smooth > 0 && !sparse(key)) traces.push(line(raw[0].x, raw[0].y, "", color, { width: 0.8, opacity: 0.28, ...quiet }));
      if (evaluation) traces.push(...spreadOf(members[0], color));
      traces.push(line(curves[0].x, curves[0].y, whose, color, { ...look, showlegend: learning }));
      continue;
    }
    const mean = band(curves);
    for (const item of curves) traces.push(line(item.x, item.y, "", color, { width: 0.8, opacity: 0.3, ...quiet }));
    if (!mean) continue;
    if (!faint) traces.push(area(mean.x, mean.low, mean.high, color));
    traces.push(line(mean.x, mean.mean, whose, color, { ...look, showlegend: learning }));
  }
  if (learning) for (const run of runs) traces.push(...evaluatedOf(run));
  return traces;
}

function spreadOf(run, color) {
  const mean = curve(run, EVALUATION), spread = curve(run, SPREAD);
  if (mean.x.length < 2 || !spread.x.length) return [];
  const wide = valuesAt(spread, mean.x), [least, most] = ["eval/return_min", "eval/return_max"].map((key) => {
    const found = curve(run, key);
    return found.x.length ? valuesAt(found, mean.x) : null;
  });
  return [area(mean.x, mean.y.map((y, i) => Math.max(y - wide[i], least ? least[i] : -Infinity)),
    mean.y.map((y, i) => Math.min(y + wide[i], most ? most[i] : Infinity)), color)];
}

function evaluatedOf(run) {  // results of rl-lab eval
  return run.evaluated.map((point) => {
    const steps = run.x.step;
    let at = steps.findIndex((step) => step >= point.step);
    if (at < 0) at = steps.length - 1;
    const x = state.x === "step" ? point.step : at < 0 ? null : run.x[state.x][at];
    const bars = point.low === null ? {} : { error_y: { type: "data", symmetric: false, thickness: 1.5, color: run.color,
      array: [point.high - point.mean], arrayminus: [point.mean - point.low] } };
    return line([x], [point.mean], `${brief(run.label)}, rl-lab eval`, run.color,
      { mode: "markers", marker: { symbol: "diamond", size: 10, color: run.color }, showlegend: true, ...bars });
  }).filter((trace) => trace.x[0] !== null);
}

// --- Drawing ---

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const coarse = matchMedia("(pointer: coarse)").matches;

function scaleOf(runs) {  // of the x axis: a unit of time that gives readable numbers
  if (state.x !== "seconds") return [data.axes[state.x], 1];
  const longest = Math.max(0, ...runs.map((run) => run.x.seconds.at(-1) || 0));
  const [unit, size] = UNITS.find(([, , limit]) => longest < limit);
  return [`wall time, ${unit}`, size];
}

const paper = () => ({ paper_bgcolor: css("--card"), plot_bgcolor: css("--card"),
  font: { color: css("--soft"), family: getComputedStyle(document.body).fontFamily },
  modebar: { bgcolor: css("--card"), color: css("--soft"), activecolor: css("--accent") } });
const hoverLook = () => ({ namelength: -1, bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink"), size: 12 } });
const legendBelow = { orientation: "h", x: 0, xanchor: "left", yref: "container", y: 0, yanchor: "bottom", font: { size: 12 } };
const axisOf = (big) => ({ gridcolor: css("--line"), zeroline: false, linecolor: css("--line"), automargin: true,
  tickfont: { size: big ? 12 : 10 }, fixedrange: coarse && !big });
const configOf = (spec, big) => ({ displaylogo: false, responsive: true, displayModeBar: coarse ? big : "hover",
  modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"], ...(big ? [["toImage"]] : [])],
  toImageButtonOptions: { format: "png", scale: 2, filename: spec.title.replace(/[^\w-]+/g, "_") } });
const note = (traces, task) => traces.length ? [] : [{ text: shown(task || null).length ? "no value yet" : "no run is chosen",
  showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5 }];

function draw(box) {
  const spec = JSON.parse(box.dataset.chart), area = one(".plotarea", box);
  box.dirty = false;
  if (spec.kind === "phases") return drawPhases(spec, area);
  const traces = tracesOf(spec), [label, size] = scaleOf(data.runs);
  if (size !== 1) for (const trace of traces) trace.x = trace.x.map((x) => x / size);
  const values = traces.flatMap((trace) => trace.y).filter((y) => y !== null);
  const low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  const learning = spec.keys.length > 1;
  const logarithmic = low > 0 && (state.log || (!learning && high / low > data.logRange));
  const big = spec.large || box.classList.contains("wide"), narrow = area.clientWidth < 460;
  const axis = axisOf(big), legend = traces.some((trace) => trace.showlegend);
  const layout = {
    ...paper(),
    margin: { l: 8, r: 12, t: big && coarse ? 34 : 8, b: 8 }, height: spec.large ? (narrow ? 340 : 400) : big ? 400 : 190,
    hovermode: traces.filter((trace) => trace.name).length > 12 || !big || narrow ? "closest" : "x unified", dragmode: coarse ? false : "zoom",
    hoverdistance: 40, hoverlabel: hoverLook(),
    xaxis: { ...axis, title: big && !narrow ? { text: label, font: { size: 12 } } : undefined, nticks: big && !narrow ? 9 : 5,
      hoverformat: ",.6~g", spikecolor: css("--soft"), spikethickness: 1, spikedash: "solid", uirevision: state.x },
    yaxis: { ...axis, type: logarithmic ? "log" : "linear", title: spec.unit && !narrow ? { text: spec.unit, font: { size: 12 } } : undefined,
      nticks: big ? 8 : 5, uirevision: String(logarithmic) },
    showlegend: legend, legend: legendBelow, annotations: note(traces, spec.task),
  };
  return window.Plotly.react(area, traces, layout, configOf(spec, big));
}

// A row for each run: its phases are bars, and those that take turns lie above each other in one bar. y is in pixels.
function drawPhases(spec, area) {
  const runs = shown(null).filter((run) => run.phases.length), several = data.runs.length > 1;
  const [label, size] = scaleOf(data.runs), narrow = area.clientWidth < 460, touch = coarse ? 34 : 0;
  const named = new Map(Object.entries(data.phaseColors).map(([name, [color, ink]]) => [name, { type: "bar", orientation: "h",
    name, base: [], x: [], y: [], width: [], text: [], customdata: [], hovertemplate: "%{customdata}<extra></extra>",
    marker: { color, line: { width: 0 } }, textposition: "inside", insidetextanchor: "middle", textangle: 0,
    insidetextfont: { color: ink, size: 12 }, showlegend: true }]));
  const end = ([begin, width]) => begin + width;
  const whole = Math.max(0, ...runs.map((run) => end(run.phases.at(-1).x[state.x]))) || 1;
  const titles = [];
  let y = 0;
  for (const run of runs) {
    if (several) {
      y += 22;
      titles.push({ text: short(brief(run.label), narrow ? 44 : 90), showarrow: false, xref: "paper", x: 0, xanchor: "left", y,
        yanchor: "bottom", font: { size: 12 } });
    }
    const tall = Math.max(32, 22 * Math.max(...run.phases.map((bar) => bar.names.length)));
    for (const { names, facts, x } of run.phases) names.forEach((name, at) => {
      const trace = named.get(name), [begin, width] = x[state.x], height = tall / names.length;
      trace.base.push(begin / size);
      trace.x.push(Math.max(width - data.phaseGap * whole, width / 2) / size);
      trace.y.push(y + (at + 0.5) * height);
      trace.width.push(height - (names.length > 1 ? 1.5 : 0));
      trace.text.push(name);
      trace.customdata.push((several ? `<b>${short(run.label, 60)}</b><br>` : "") + facts);
    });
    y += tall + 4;
  }
  const traces = [...named.values()].filter((trace) => trace.x.length), axis = axisOf(true);
  const letters = Math.max(1, ...traces.map((trace) => trace.name.length));
  const lines = Math.ceil(traces.length / Math.max(1, Math.floor((area.clientWidth - 30) / (7 * letters + 46))));  // of the legend
  const layout = {
    ...paper(), barmode: "overlay", uniformtext: { mode: "hide", minsize: 9 },
    margin: { l: 8, r: 12, t: 8 + touch, b: 8 }, height: Math.max(y, 32) + (narrow ? 44 : 62) + 20 * lines + touch,
    hovermode: "closest", dragmode: coarse ? false : "zoom", hoverlabel: { ...hoverLook(), align: "left" },
    xaxis: { ...axis, title: narrow ? undefined : { text: label, font: { size: 12 } }, nticks: narrow ? 5 : 9, range: [0, 1.01 * whole / size],
      uirevision: state.x },
    yaxis: { visible: false, fixedrange: true, range: [y, 0] },
    showlegend: true, legend: legendBelow, annotations: traces.length ? titles : note(traces),
  };
  return window.Plotly.react(area, traces, layout, configOf(spec, true));
}

const nearby = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    target.near = isIntersecting;
    if (isIntersecting && target.dirty !== false) draw(target);
  }
  document.documentElement.dataset.charts = "ready";  // the plots in view are drawn
}, { rootMargin: "400px 0px" });

function redraw() {
  for (const box of all(".chart")) {
    box.dirty = true;
    if (box.near) draw(box);
  }
}

// --- Controls ---

function search() {
  const words = state.search.toLowerCase().split(/\s+/).filter(Boolean);
  let found = 0;
  const boxes = all(".chart");
  for (const box of boxes) {
    const spec = JSON.parse(box.dataset.chart), name = (spec.title + " " + spec.keys.join(" ")).toLowerCase();
    box.hidden = !words.every((word) => name.includes(word));
    found += !box.hidden;
  }
  for (const section of all("section[data-metrics]")) section.hidden = !all(".chart", section).some((box) => !box.hidden);
  one("#found").textContent = words.length ? `${found} of ${boxes.length}` : "";
}

function chips() {
  const row = one("#run-chips");
  row.replaceChildren();
  if (data.runs.length < 2) return;
  const button = (text, click, pressed) => {
    const made = document.createElement("button");
    made.type = "button";
    made.textContent = text;
    if (pressed !== undefined) made.setAttribute("aria-pressed", pressed);
    made.onclick = click;
    row.append(made);
    return made;
  };
  const change = (hidden) => { state.hidden = hidden; chips(); remember(); redraw(); };
  const labels = data.runs.map((run) => run.label);
  for (const run of data.runs) {
    const on = !state.hidden.includes(run.label);
    const made = button(run.label, () =>
      change(on ? [...state.hidden, run.label] : state.hidden.filter((label) => label !== run.label)), on);
    made.ondblclick = () => change(labels.filter((label) => label !== run.label));
    made.title = "shown or hidden; a double click shows only this run";
    made.style.setProperty("--run", run.color);
  }
  if (labels.length > 2) {
    button("all", () => change([])).className = "plain";
    button("none", () => change(labels)).className = "plain";
  }
  one("#run-count").textContent = `Runs: ${labels.filter((label) => !state.hidden.includes(label)).length} of ${labels.length}`;
}

function controls() {
  const bind = (id, event, read, after = redraw) => {
    const element = one("#" + id);
    element.addEventListener(event, () => { read(element); remember(); after(); });
    return element;
  };
  const percent = () => { one("#smooth-value").textContent = state.smooth ? `${state.smooth} %` : "off"; };
  bind("x-axis", "change", (element) => { state.x = element.value; }).value = state.x;
  bind("smooth", "input", (element) => { state.smooth = Number(element.value); percent(); }).value = state.smooth;
  bind("log-y", "change", (element) => { state.log = element.checked; }).checked = state.log;
  bind("search", "input", (element) => { state.search = element.value; }, () => { search(); redraw(); }).value = state.search;
  const seeds = bind("seeds", "change", (element) => { state.seeds = element.value; });
  seeds.value = state.seeds;
  seeds.parentElement.hidden = !data.several;
  one("#runs-box").hidden = data.runs.length < 2;
  one("#runs-box").open = data.runs.length < 9 && innerWidth > 640;
  percent();
  chips();
  one("#controls").hidden = false;
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !/INPUT|SELECT|TEXTAREA/.test(document.activeElement.tagName)) {
      event.preventDefault();
      one("#search").focus();
    }
  });
  document.addEventListener("click", (event) => {
    const title = event.target.closest(".chart button.title");
    if (!title) return;
    const box = title.closest(".chart"), wide = box.classList.toggle("wide");
    title.setAttribute("aria-expanded", wide);
    draw(box);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}

async function read() { data = JSON.parse(await unpack("chart-data")); }

async function start() {
  if (!one("#chart-data")) return;
  try {
    await read();
    const code = document.createElement("script");
    code.nonce = nonce;
    code.textContent = await unpack("chart-library");
    document.head.append(code);
  } catch (error) {
    for (const area of all(".plotarea")) area.textContent = "This browser cannot draw the plots; see the .png files beside the page.";
    console.warn(error);
    return;
  }
  if (!(state.x in data.axes)) state.x = "step";
  controls();
  search();
  for (const box of all(".chart")) nearby.observe(box);
}

// A served page calls this after it replaced what changed: new curves, perhaps new charts.
async function update() {
  if (!window.Plotly) return start();
  await read();
  chips();
  search();
  nearby.disconnect();
  for (const box of all(".chart")) nearby.observe(box);
  redraw();
}

window.rlLabCharts = { update, band, smooth, state };
start();
})();
