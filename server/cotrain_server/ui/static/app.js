// What the pages need next to htmx: the form token, quiet polling, copying, charts. No framework, no build.
"use strict";

(() => {
  const token = document.querySelector('meta[name="csrf"]')?.content ?? "";

  document.addEventListener("htmx:configRequest", (event) => {
    event.detail.headers["X-CSRF-Token"] = token;
  });

  // ---- A narrow screen shows a part of the navigation: the one with this page.

  const current = document.querySelector("nav [aria-current=page]");
  const nav = current?.closest("nav");
  if (nav) nav.scrollLeft = current.offsetLeft - (nav.clientWidth - current.offsetWidth) / 2;

  // ---- Polling: not in a tab that is hidden, not while something in the part is open or typed into.

  const isBusy = (part) =>
    part.querySelector("details.menu[open], input:focus, textarea:focus, select:focus") !== null;

  document.addEventListener("htmx:beforeRequest", (event) => {
    const part = event.detail.elt;
    if (part.hasAttribute("data-poll") && (document.hidden || isBusy(part))) event.preventDefault();
  });

  document.addEventListener("visibilitychange", () => {
    if (document.hidden) return;
    for (const part of document.querySelectorAll("[data-poll]")) window.htmx.trigger(part, "resume");
  });

  const note = document.getElementById("connection");
  const showConnection = (isThere) => {
    if (note) note.hidden = isThere;
  };
  document.addEventListener("htmx:sendError", () => showConnection(false));
  document.addEventListener("htmx:responseError", (event) => {
    if (event.detail.xhr.status >= 500) showConnection(false);
  });
  document.addEventListener("htmx:afterRequest", (event) => {
    if (event.detail.successful) showConnection(true);
  });

  // ---- Buttons.

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy]");
    if (!button) return;
    const text = document.getElementById(button.dataset.copy).textContent;
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      // A page without HTTPS has no clipboard: select the text, so that a key press copies it.
      window.getSelection().selectAllChildren(document.getElementById(button.dataset.copy));
      button.textContent = "Press Ctrl+C";
    }
    setTimeout(() => (button.textContent = "Copy"), 1600);
  });

  document.addEventListener("submit", (event) => {
    const question = event.target.dataset.confirm;
    if (question && !window.confirm(question)) event.preventDefault();
  });

  document.addEventListener("change", (event) => {
    if (event.target.matches("select[data-submit]")) event.target.form.requestSubmit();
  });

  // ---- Charts: `data-chart` holds {x, series: [{label, values}], unit, log}. uPlot draws on a canvas,
  // so the same numbers stand in a table of the page, or behind its CSV link.

  const charts = new Map();
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const short = (value) => {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size >= 1e6) return (value / 1e6).toPrecision(3) + " M";
    if (size >= 1e4) return (value / 1e3).toPrecision(3) + " k";
    if (size !== 0 && size < 1e-4) return value.toExponential(2);
    return String(Number(value.toPrecision(5)));
  };

  const options = (given, width, height) => ({
    width,
    height,
    cursor: { y: false, points: { size: 6 } },
    legend: { live: true },
    scales: { x: { time: false }, y: { distr: given.log ? 3 : 1 } },
    axes: [
      { stroke: colour("--muted"), grid: { show: false }, ticks: { stroke: colour("--line") }, size: 30,
        font: "11px system-ui" },
      { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false },
        size: 56, font: "11px system-ui", values: (_, values) => values.map(short) },
    ],
    series: [
      { label: given.xLabel ?? "step", value: (_, value) => (value === null ? "–" : String(value)) },
      ...given.series.map((each, number) => ({
        label: each.label,
        stroke: colour(`--s${number % 8}`),
        width: 1.6,
        points: { show: given.x.length < 2, size: 5 },
        spanGaps: true,
        value: (_, value) => short(value) + (value === null || !given.unit ? "" : " " + given.unit),
      })),
    ],
  });

  const draw = (element) => {
    charts.get(element)?.destroy();
    const given = JSON.parse(element.dataset.chart);
    const data = [given.x, ...given.series.map((each) => each.values)];
    element.replaceChildren();
    charts.set(element, new window.uPlot(options(given, element.clientWidth, 180), data, element));
  };

  const drawAll = () => {
    for (const element of charts.keys()) if (!element.isConnected) charts.delete(element);
    for (const element of document.querySelectorAll("[data-chart]")) draw(element);
  };

  if (window.uPlot) {
    drawAll();
    document.addEventListener("htmx:afterSettle", drawAll);
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
    let waiting = 0;
    window.addEventListener("resize", () => {
      clearTimeout(waiting);
      waiting = setTimeout(drawAll, 120);
    });
  }
})();
