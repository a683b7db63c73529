// Keeps a served report up to date: the state of the runs every few seconds, and what changed on the page.
"use strict";
(() => {
const POLL_MS = 2000;
const main = document.querySelector("main");
const query = location.search;
const own = document.currentScript.dataset.run;  // the number of the run that this page shows; undefined: all of them
const title = document.title;
let stamp = document.currentScript.dataset.stamp;

const headings = (root) => [...root.querySelectorAll("section")];
for (const section of headings(main)) section.source = section.outerHTML;

const live = document.createElement("div");
live.className = "live";
live.setAttribute("aria-live", "off");
(main.querySelector(".contents") || main.querySelector("p")).after(live);

function element(tag, text, name) {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  if (name) made.className = name;
  return made;
}

function words(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${Math.round(seconds / 86400)} days`;
}

function show(runs) {
  live.replaceChildren(...runs.filter((run) => own === undefined || String(run.number) === own).map((run) => {
    const row = element("div", "", "card run");
    const name = element("a", run.label);
    name.href = own === undefined ? `/run/${run.number}${query}` : `/${query}`;
    if (own !== undefined) name.textContent = "← all runs";
    name.title = run.folder;
    const bar = element("progress");
    bar.max = 1;
    bar.value = run.progress ?? 0;
    bar.setAttribute("aria-label", "progress");
    bar.hidden = run.state === "finished";
    const facts = [run.phase, run.progress === null || bar.hidden ? null : `${Math.floor(100 * run.progress)} %`,
      run.left === null ? null : `${words(run.left)} left`,
      run.age === null ? null : `${run.state === "running" ? "updated" : "last line"} ${words(run.age)} ago`, run.note];
    row.append(name, element("span", run.state, `state ${run.state}`), bar,
      element("span", facts.filter(Boolean).join(" · "), "soft"));
    return row;
  }));
  const running = runs.filter((run) => run.state === "running" && run.progress !== null &&
    (own === undefined || String(run.number) === own));
  const share = running.length ? `${Math.floor(100 * Math.min(...running.map((run) => run.progress)))} % · ` : "";
  document.title = share + title;
}

// Put the sections of the fresh page in place; those that did not change stay, with their zoom and films.
async function renew() {
  const address = new URL(location.href);
  address.searchParams.set("part", "1");
  const answer = await fetch(address);
  if (!answer.ok) return false;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  const before = new Map(headings(main).map((section) => [section.querySelector("h2")?.id, section]));
  const opened = new Set([...main.querySelectorAll("details[open] > summary")].map((summary) => summary.textContent));
  for (const name of ["h1", ".soft", ".contents", ".facts"]) {
    const old = main.querySelector(`:scope > ${name}`), now = fresh.querySelector(`main > ${name}`);
    if (old && now) old.innerHTML = now.innerHTML;
  }
  const wanted = headings(fresh).map((section) => {
    const source = section.outerHTML, old = before.get(section.querySelector("h2")?.id);
    if (old && old.source === source) return old;
    const made = document.adoptNode(section);
    made.source = source;
    const films = new Map(old ? [...old.querySelectorAll("figure[data-file]")].map((film) => [film.dataset.file, film]) : []);
    for (const film of made.querySelectorAll("figure[data-file]")) {
      const same = films.get(film.dataset.file);
      if (same) film.replaceWith(same);
    }
    for (const summary of made.querySelectorAll("details > summary"))
      summary.parentElement.open = opened.has(summary.textContent);
    return made;
  });
  for (const section of before.values()) if (!wanted.includes(section)) section.remove();
  let at = headings(main)[0] ?? null;
  for (const section of wanted) {
    if (section === at) { at = at.nextElementSibling; continue; }
    if (at) main.insertBefore(section, at); else main.append(section);
    for (const film of section.querySelectorAll("video")) film.play().catch(() => {});
  }
  const curves = document.querySelector("#chart-data"), newer = fresh.querySelector("#chart-data");
  if (Boolean(curves) !== Boolean(newer)) location.reload();
  else if (newer && curves.textContent !== newer.textContent) {
    curves.textContent = newer.textContent;
    await window.rlLabCharts?.update();
  }
  return true;
}

async function poll() {
  try {
    const answer = await fetch("/status" + query);
    if (!answer.ok) throw new Error(answer.status);
    const status = await answer.json();
    show(status.runs);
    const run = status.runs.find((item) => String(item.number) === own);
    const now = own === undefined ? status.version : run ? run.stamp : stamp;
    if (now !== stamp && await renew()) stamp = now;
  } catch (error) {
    document.title = "(disconnected) " + title;
  }
  setTimeout(poll, POLL_MS);
}
poll();
})();
