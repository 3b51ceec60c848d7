// The timeline of a run report: zoom, and what is known of the bar that is pointed at, tapped or chosen with the keys.
"use strict";
(() => {
  const block = document.getElementById("timeline-data");
  if (!block) return;
  const data = JSON.parse(block.textContent);
  const figure = document.getElementById("timeline-figure");
  const box = figure.querySelector(".scroll");
  const drawing = figure.querySelector(".drawing");
  const card = document.getElementById("timeline-card");
  const MAX_ZOOM = 64, LABEL_PX = 9, TICK_PX = 110, MAX_SAMPLES = 8;
  const bars = new Map();
  for (const bar of drawing.querySelectorAll("rect[data-bar]")) {
    if (!bar.classList.contains("p")) bars.set(Number(bar.dataset.bar), bar);
  }
  let zoom = 1;
  let chosen = null;

  // Words and numbers ---------------------------------------------------------------------------------------------
  function seconds(value) {
    if (value === null) return "unknown";
    if (value < 1e-3) return `${(value * 1e6).toFixed(0)} us`;
    if (value < 1) return `${(value * 1e3).toFixed(1)} ms`;
    return `${value.toFixed(2)} s`;
  }
  function tick(value) {
    return value >= 1 ? `${Number(value.toPrecision(4))} s` : `${Number((value * 1e3).toPrecision(4))} ms`;
  }
  function counted(number, what) {
    return `${number} ${what}${number === 1 ? "" : "s"}`;
  }
  function sampleText(position, item) {
    const sample = data.samples[position];
    if (!sample) return `sample ${position + 1} of the batch`;
    const [id, index, numText, , numLlm, items] = sample;
    const name = `${id} (row ${index})`;
    if (item >= 0 && items[item]) {
      const [module, size, numTokens, numRows] = items[item];
      return `${name}: ${size}, ${numTokens} ${module} tokens, ${numRows} rows for the LLM`;
    }
    const media = items.map(([, size]) => size).join("; ");
    return `${name}: ${numLlm} LLM tokens, ${numText} of text${media ? `; ${media}` : ""}`;
  }

  // What is told about a bar -----------------------------------------------------------------------------------------
  function add(parent, tag, text) {
    const element = document.createElement(tag);
    element.textContent = text;
    parent.append(element);
    return element;
  }
  function describe(number) {
    const [lane, kind, microbatch, start, duration, predicted, compute, numTokens, numItems, items] = data.bars[number];
    const [policy, name] = data.lanes[lane];
    card.replaceChildren();
    const what = microbatch < 0
      ? "gradient reduction and optimizer"
      : `${data.kinds[kind]} of microbatch ${microbatch + 1} of ${data.num_microbatches}`;
    add(card, "strong", `${policy}, ${name}: ${what}`);
    const facts = add(card, "p", `measured ${seconds(duration)}, from ${seconds(start)} to ${seconds(start + duration)}`);
    if (microbatch >= 0) {
      facts.textContent += `; of it compute ${seconds(compute)}`;
      const off = predicted === null || !compute ? "" : `, ${((predicted / compute - 1) * 100).toFixed(1)} % off`;
      add(card, "p", `predicted ${seconds(predicted)} of compute${off}`);
      const pairs = [];
      for (let i = 0; i < items.length; i += 2) pairs.push([items[i], items[i + 1]]);
      const parts = pairs.length && pairs[0][1] >= 0 ? "media item" : "sample";
      add(card, "p", numItems ? `${counted(numItems, parts)}, ${numTokens} tokens` : `${numTokens} tokens`);
      const list = add(card, "ul", "");
      for (const [position, item] of pairs.slice(0, MAX_SAMPLES)) add(list, "li", sampleText(position, item));
      if (numItems > MAX_SAMPLES) add(list, "li", `and ${numItems - MAX_SAMPLES} more`);
    }
  }
  function choose(number) {
    if (number === chosen || !bars.has(number)) return;
    if (chosen !== null) bars.get(chosen).classList.remove("chosen");
    chosen = number;
    bars.get(number).classList.add("chosen");
    describe(number);
  }
  function pointedAt(event) {
    const number = event.target.dataset ? event.target.dataset.bar : undefined;
    if (number !== undefined) choose(Number(number));
  }
  drawing.addEventListener("pointerover", pointedAt);
  drawing.addEventListener("click", pointedAt);

  // Zoom -------------------------------------------------------------------------------------------------------------
  function redraw() {
    const width = drawing.getBoundingClientRect().width;
    for (const label of drawing.querySelectorAll("text.n")) {
      label.classList.toggle("hidden", Number(label.dataset.share) * width < LABEL_PX);
    }
    const least = data.end_s * TICK_PX / width;
    const power = 10 ** Math.floor(Math.log10(least));
    const every = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= least * (1 - 1e-9));
    for (const axis of drawing.querySelectorAll(".axis")) drawAxis(axis, every);
  }
  function drawAxis(axis, every) {
    const { top, bottom } = axis.dataset;
    axis.replaceChildren();
    for (let i = 0; i * every <= data.end_s; i += 1) {
      const x = `${100 * i * every / data.end_s}%`;
      addSvg(axis, "line", { x1: x, x2: x, y1: top, y2: bottom });
      if (i * every <= 0.97 * data.end_s) addSvg(axis, "text", { x, y: Number(bottom) + 12 }).textContent = tick(i * every);
    }
  }
  function addSvg(parent, tag, attributes) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    parent.append(element);
    return element;
  }
  function zoomTo(wanted, clientX) {
    const before = box.getBoundingClientRect();
    const at = clientX === undefined ? before.width / 2 : clientX - before.left;
    const share = (box.scrollLeft + at) / drawing.getBoundingClientRect().width;
    zoom = Math.min(MAX_ZOOM, Math.max(1, wanted));
    drawing.style.width = `${zoom * 100}%`;
    redraw();
    box.scrollLeft = share * drawing.getBoundingClientRect().width - at;
    figure.dataset.zoom = zoom;
  }
  const buttons = figure.querySelector(".buttons");
  buttons.hidden = false;
  const steps = { in: () => zoom * 2, out: () => zoom / 2, whole: () => 1 };
  for (const button of buttons.querySelectorAll("button")) {
    button.addEventListener("click", () => zoomTo(steps[button.dataset.zoom]()));
  }
  box.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoomTo(zoom * 2 ** (-event.deltaY / 200), event.clientX);
  }, { passive: false });

  // Keys -------------------------------------------------------------------------------------------------------------
  function follow(number) {
    choose(number);
    const at = bars.get(number).getBoundingClientRect(), inside = box.getBoundingClientRect();
    if (at.left < inside.left || at.right > inside.right) box.scrollLeft += at.left - inside.left - inside.width / 3;
  }
  function otherLane(direction) {
    const [lane, , , start] = data.bars[chosen];
    const of = data.bars.map((bar, i) => [Math.abs(bar[3] - start), i, bar[0]]).filter((b) => b[2] === lane + direction);
    return of.length ? of.reduce((best, b) => (b[0] < best[0] ? b : best))[1] : chosen;
  }
  box.addEventListener("keydown", (event) => {
    const moves = {
      ArrowRight: () => follow(Math.min(data.bars.length - 1, chosen + 1)),
      ArrowLeft: () => follow(Math.max(0, chosen - 1)),
      ArrowDown: () => follow(otherLane(1)),
      ArrowUp: () => follow(otherLane(-1)),
      "+": () => zoomTo(zoom * 2),
      "-": () => zoomTo(zoom / 2),
      0: () => zoomTo(1),
    };
    if (!(event.key in moves) || event.ctrlKey || event.metaKey || !data.bars.length) return;
    event.preventDefault();
    if (chosen === null) chosen = 0, bars.get(0).classList.add("chosen"), describe(0);
    else moves[event.key]();
  });

  new ResizeObserver(redraw).observe(box);
  redraw();
  figure.dataset.zoom = zoom;
})();
