// What the pages need next to htmx: quiet polling, copying, charts. No framework, no build.
"use strict";

(() => {
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

  // A poll replaces the rows, so the parts that were opened are opened again.
  const opened = new Set();
  const showOpened = () => {
    for (const button of document.querySelectorAll("[data-show]")) {
      if (!opened.has(button.dataset.show)) continue;
      document.getElementById(button.dataset.show).hidden = false;
      button.parentElement.hidden = true;
    }
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-show]");
    if (!button) return;
    opened.add(button.dataset.show);
    showOpened();
  });
  document.addEventListener("htmx:afterSettle", showOpened);

  document.addEventListener("submit", (event) => {
    const question = event.submitter?.dataset.confirm ?? event.target.dataset.confirm;
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

  // Options of the page Compare: scale of y, clipping, and hidden runs.
  const chosen = { log: false, clip: false, hidden: new Set() };

  // Return the range of y without the lowest and highest 5 % of the values.
  const clipped = (given) => {
    const seen = given.series
      .filter((_, number) => !chosen.hidden.has(number))
      .flatMap((each) => each.values)
      .filter((value) => value !== null && (!chosen.log || value > 0))
      .sort((a, b) => a - b);
    if (!seen.length) return [0.1, 1];
    const low = seen[Math.floor(0.05 * (seen.length - 1))];
    const high = seen[Math.ceil(0.95 * (seen.length - 1))];
    if (low < high) return [low, high];
    return chosen.log ? [low / 2, high * 2] : [low - 1, high + 1]; // a logarithm needs positive ends
  };

  const options = (given, width, height) => ({
    width,
    height,
    cursor: { y: false, points: { size: 6 } },
    legend: { live: true },
    scales: {
      x: { time: false, distr: given.isScatter ? 3 : 1 },
      y: { distr: chosen.log ? 3 : 1, ...(chosen.clip ? { range: () => clipped(given) } : {}) },
    },
    // Without a pointer the legend shows the last values.
    hooks: {
      setCursor: [
        (plot) => {
          if (plot.cursor.idx == null) plot.setLegend({ idx: given.x.length - 1 }, false);
        },
      ],
    },
    axes: [
      { stroke: colour("--muted"), grid: { show: false }, ticks: { stroke: colour("--line") }, size: 30,
        font: "11px system-ui", ...(given.isScatter ? { values: (_, values) => values.map(short) } : {}) },
      { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false },
        size: 56, font: "11px system-ui", values: (_, values) => values.map(short) },
    ],
    series: [
      { label: given.xLabel ?? "step", value: (_, value) =>
          value === null ? "–" : given.isScatter ? short(value) : String(value) },
      ...given.series.map((each, number) => ({
        label: each.label,
        show: given.isScatter || !chosen.hidden.has(number),
        stroke: colour(`--s${number % 8}`),
        width: 1.6,
        points: { show: given.x.length < 2 || given.isScatter, size: given.isScatter ? 8 : 5 },
        ...(given.isScatter ? { paths: () => null } : {}),
        spanGaps: true,
        value: (_, value) => short(value) + (value === null || !given.unit ? "" : " " + given.unit),
      })),
    ],
  });

  const draw = (element) => {
    charts.get(element)?.destroy();
    const given = JSON.parse(element.dataset.chart);
    // A logarithm needs positive values.
    const shown = (value) => (chosen.log && value !== null && value <= 0 ? null : value);
    const data = [given.x, ...given.series.map((each) => each.values.map(shown))];
    element.replaceChildren();
    const plot = new window.uPlot(options(given, element.clientWidth, 180), data, element);
    plot.setLegend({ idx: given.x.length - 1 }, false);
    charts.set(element, plot);
  };

  const drawAll = () => {
    for (const element of charts.keys()) if (!element.isConnected) charts.delete(element);
    for (const element of document.querySelectorAll("[data-chart]")) draw(element);
  };

  if (window.uPlot) {
    drawAll();
    document.addEventListener("change", (event) => {
      const option = event.target.dataset.option;
      if (!option) return;
      chosen[option] = event.target.checked;
      drawAll();
    });
    document.addEventListener("click", (event) => {
      const button = event.target.closest("[data-series]");
      if (!button) return;
      const number = Number(button.dataset.series);
      const isShown = !chosen.hidden.delete(number);
      if (isShown) chosen.hidden.add(number);
      button.setAttribute("aria-pressed", String(!isShown));
      drawAll();
    });
    document.addEventListener("htmx:afterSettle", drawAll);
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
    let waiting = 0;
    window.addEventListener("resize", () => {
      clearTimeout(waiting);
      waiting = setTimeout(drawAll, 120);
    });
  }
})();
