// Line charts as SVG: axes, a curve, marks, and a cross-hair for pointer and keyboard.

import { element, known } from "./text.js";

const SVG = "http://www.w3.org/2000/svg";
const LEFT = 52;
const RIGHT = 10;
const TOP = 8;
const BOTTOM = 22;

function shape(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function niceTicks(low, high, wanted) {
  const raw = (high - low) / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= raw);
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9; tick += step) ticks.push(tick);
  return ticks;
}

export class LineChart {
  // `label` names it, `format` writes a value and `axis` one of the axis, `zero` lets the axis begin at 0.
  constructor(box, { label, format, axis = format, zero = false }) {
    Object.assign(this, { box, label, format, axis, zero });
    this.steps = [];
    this.values = [];
    this.marks = [];
    this.at = null;
    this.svg = shape("svg", { role: "img", tabindex: "0", "aria-label": label });
    this.tip = element("div", { className: "tip", hidden: true });
    this.empty = element("p", { className: "empty" }, "No step has ended yet");
    box.append(this.empty);
    this.svg.addEventListener("pointermove", (event) => this.#point(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.#show(null));
    this.svg.addEventListener("blur", () => this.#show(null));
    this.svg.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
      if (!move || !this.steps.length) return;
      event.preventDefault();
      const last = this.steps.length - 1;
      this.#show(Math.max(0, Math.min(last, (this.at ?? last) + move)));
    });
    new ResizeObserver(() => this.#draw()).observe(box);
  }

  update(steps, values, marks = []) {
    Object.assign(this, { steps, values, marks });
    if (steps.length && this.empty.isConnected) this.box.replaceChildren(this.svg, this.tip);
    this.#draw();
  }

  get logarithmic() {
    return this.scale === "log";
  }

  #draw() {
    const { steps, values, marks, box, svg } = this;
    const width = box.clientWidth;
    const height = box.clientHeight;
    if (!steps.length || !width) return;
    const all = [...values, ...marks.map((mark) => mark.value)].filter(known);
    if (!all.length) return;
    let low = this.zero ? 0 : Math.min(...all);
    let high = Math.max(...all);
    this.scale = !this.zero && low > 0 && high / low > 30 ? "log" : "linear";
    const forward = this.scale === "log" ? Math.log10 : (value) => value;
    if (high === low) [low, high] = this.scale === "log" ? [low / 2, high * 2] : [low - Math.abs(low) / 2 - 1e-9, high + Math.abs(high) / 2 + 1e-9];
    const [from, to] = [forward(low), forward(high) + (forward(high) - forward(low)) * 0.06];
    const [first, last] = [steps[0], Math.max(steps[steps.length - 1], steps[0] + 1)];
    this.x = (step) => LEFT + ((step - first) / (last - first)) * (width - LEFT - RIGHT);
    this.y = (value) => height - BOTTOM - ((forward(value) - from) / (to - from)) * (height - TOP - BOTTOM);
    const parts = [];
    const levels = this.scale === "log" ? this.#decades(low, high) : niceTicks(low, high, 4);
    for (const level of levels) {
      const y = Math.round(this.y(level)) + 0.5;
      parts.push(shape("line", { class: "gridline", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }));
      parts.push(shape("text", { x: LEFT - 8, y: y + 4, "text-anchor": "end" }, this.axis(level)));
    }
    for (const tick of niceTicks(first, last, Math.max(3, Math.floor(width / 90)))) {
      if (Number.isInteger(tick)) {
        const x = this.x(tick);
        parts.push(shape("text", { x, y: height - 5, "text-anchor": x > width - 30 ? "end" : "middle" }, tick.toLocaleString("en-US")));
      }
    }
    let line = "";
    let area = "";
    let begin = null;
    const bottom = height - BOTTOM;
    steps.forEach((step, place) => {
      const value = values[place];
      if (!known(value)) {
        begin = null;
        return;
      }
      const point = `${this.x(step).toFixed(1)} ${this.y(value).toFixed(1)}`;
      line += `${begin === null ? "M" : "L"}${point}`;
      if (begin === null) {
        begin = this.x(step).toFixed(1);
        area += `M${begin} ${bottom}`;
      }
      area += `L${point}`;
      if (place === steps.length - 1 || !known(values[place + 1])) area += `L${this.x(step).toFixed(1)} ${bottom}Z`;
    });
    parts.push(shape("path", { class: "area", d: area }), shape("path", { class: "curve", d: line }));
    for (const mark of marks) {
      if (known(mark.value)) parts.push(shape("circle", { class: "mark", cx: this.x(mark.step), cy: this.y(mark.value), r: marks.length > 40 ? 1.5 : 3.5 }));
    }
    this.cross = shape("line", { class: "cross", y1: TOP, y2: bottom, visibility: "hidden" });
    parts.push(this.cross);
    svg.replaceChildren(...parts);
    const newest = [...values].reverse().find(known);
    svg.setAttribute("aria-label", `${this.label}, newest ${known(newest) ? this.format(newest) : "unknown"}; arrow keys read values`);
    if (this.at !== null) this.#show(Math.min(this.at, steps.length - 1));
  }

  #decades(low, high) {
    const ticks = [];
    for (let power = Math.ceil(Math.log10(low)); power <= Math.log10(high); power += 1) ticks.push(10 ** power);
    return ticks.length > 1 ? ticks : [low, high];
  }

  #point(offset) {
    if (!this.x || !this.steps.length) return;
    let best = 0;
    this.steps.forEach((step, place) => {
      if (Math.abs(this.x(step) - offset) < Math.abs(this.x(this.steps[best]) - offset)) best = place;
    });
    this.#show(best);
  }

  #show(place) {
    this.at = place;
    this.tip.hidden = place === null;
    if (place === null) {
      this.cross?.setAttribute("visibility", "hidden");
      return;
    }
    const x = this.x(this.steps[place]);
    const value = this.values[place];
    const near = this.marks.find((mark) => mark.step === this.steps[place]);
    this.tip.textContent = `step ${this.steps[place].toLocaleString("en-US")}\n${known(value) ? this.format(value) : "unknown"}`
      + (near && known(near.value) ? `\n${near.text}` : "");
    this.cross.setAttribute("x1", x);
    this.cross.setAttribute("x2", x);
    this.cross.setAttribute("visibility", "visible");
    const left = x > this.box.clientWidth / 2 ? x - this.tip.offsetWidth - 10 : x + 10;
    this.tip.style.transform = `translate(${left.toFixed(0)}px, ${TOP}px)`;
  }
}
