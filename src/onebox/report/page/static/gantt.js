// The schedule of a step as a Gantt chart on a canvas, which wheel, drag and keys zoom and move.

import { element, seconds } from "./text.js";

const AXIS = 22;
const NARROW = 640;
const COLOURS = {
  forward: "--forward", backward: "--backward", "input gradient": "--input", "weight gradient": "--weight",
  update: "--update", wait: "--wait", transfer: "--transfer", other: "--other",
};

export class Gantt {
  // `onRead` gets the text of what is pointed at, `onHold` whether a zoomed view holds an older step.
  constructor(box, { onRead, onHold }) {
    Object.assign(this, { box, onRead, onHold });
    this.data = null;
    this.newer = null;
    this.view = null;
    this.canvas = element("canvas", { tabIndex: 0, role: "img" });
    this.scroll = element("div", { className: "scroll" }, this.canvas);
    this.tip = element("div", { className: "tip", hidden: true });
    box.append(this.scroll, this.tip);
    this.#listen();
    new ResizeObserver(() => this.draw()).observe(box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  update(schedule) {
    if (this.zoomed && this.data) {
      this.newer = schedule;
      this.onHold(true);
      return;
    }
    this.#use(schedule);
  }

  get zoomed() {
    return this.view !== null;
  }

  colour(kind) {
    return getComputedStyle(this.box).getPropertyValue(COLOURS[kind] || "--other").trim();
  }

  zoom(factor, at = 0.5) {
    if (!this.data) return;
    const [from, to] = this.view ?? [0, this.data.length_us];
    const length = Math.min(this.data.length_us, Math.max(0.5, (to - from) * factor));
    const fixed = from + (to - from) * at;
    this.#look(fixed - length * at, length);
  }

  move(part) {
    if (!this.view) return;
    const [from, to] = this.view;
    this.#look(from + (to - from) * part, to - from);
  }

  whole() {
    this.view = null;
    if (this.newer) this.#use(this.newer);
    this.newer = null;
    this.onHold(false);
    this.draw();
  }

  #use(schedule) {
    this.data = schedule;
    const processes = [...new Set(schedule.rows.map((row) => row.process))];
    this.compact = schedule.rows.length > 40;
    const lines = new Map();
    this.lines = [];
    this.place = schedule.rows.map((row) => {
      const key = this.compact ? row.process : `${row.process}\n${row.track}`;
      if (!lines.has(key)) {
        lines.set(key, this.lines.length);
        this.lines.push({ process: row.process, track: row.track, first: !this.lines.length || this.lines[this.lines.length - 1].process !== row.process });
      }
      return lines.get(key);
    });
    this.canvas.setAttribute("aria-label",
      `Schedule of step ${schedule.step}: ${processes.length} devices over ${seconds(schedule.length_us / 1e6)}; the table below has the times. `
      + "Keys: plus and minus zoom, arrows move, 0 shows the whole step");
    this.draw();
  }

  #look(from, length) {
    const all = this.data.length_us;
    if (length >= all * 0.999) {
      this.whole();
      return;
    }
    const begin = Math.max(0, Math.min(all - length, from));
    this.view = [begin, begin + length];
    this.draw();
  }

  draw() {
    const width = this.box.clientWidth;
    if (!this.data || !width) return;
    const line = this.compact ? 15 : 19;
    const gap = this.compact ? 0 : 7;
    this.gutter = width < NARROW ? 74 : 176;
    let y = AXIS;
    this.lines.forEach((each) => {
      if (each.first && y > AXIS) y += gap;
      each.y = y;
      y += line;
    });
    const height = y + 4;
    const ratio = window.devicePixelRatio || 1;
    const { canvas } = this;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.height = `${height}px`;
    }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    const style = getComputedStyle(this.box);
    const [text, muted, grid, strong] = ["--text", "--muted", "--grid", "--strong"].map((name) => style.getPropertyValue(name).trim());
    const [from, to] = this.view ?? [0, this.data.length_us];
    const scale = (width - this.gutter - 2) / (to - from || 1);
    canvas.dataset.view = `${from} ${to}`;
    this.time = (x) => from + (x - this.gutter) / scale;
    this.#axis(context, { from, to, scale, width, height, muted, grid });
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    for (const each of this.lines) {
      if (each.first && !this.compact && each.y > AXIS) {
        context.fillStyle = grid;
        context.fillRect(0, each.y - gap / 2 - 0.5, width, 1);
      }
      const label = each.first ? this.#fit(context, each.process, this.gutter - (this.compact || width < NARROW ? 8 : 76)) : "";
      context.fillStyle = strong;
      context.fillText(label, 0, each.y + line / 2);
      if (!this.compact && width >= NARROW) {
        context.fillStyle = muted;
        context.textAlign = "right";
        context.fillText(this.#fit(context, each.track, 68), this.gutter - 8, each.y + line / 2);
        context.textAlign = "left";
      }
    }
    context.save();
    context.beginPath();
    context.rect(this.gutter, 0, width - this.gutter, height);
    context.clip();
    const colours = this.data.kinds.map((kind) => this.colour(kind));
    const thin = this.data.kinds.map((kind) => this.compact && kind === "transfer");
    this.boxes = [];
    for (const [row, kind, begin, length, name] of this.data.spans) {
      if (begin + length < from || begin > to) continue;
      const x = this.gutter + (begin - from) * scale;
      const long = Math.max(0.7, length * scale);
      const top = this.lines[this.place[row]].y + (thin[kind] ? line - 5 : 1.5);
      const tall = thin[kind] ? 4 : line - 3;
      context.fillStyle = colours[kind];
      context.fillRect(x, top, long > 3 ? long - 0.6 : long, tall);
      this.boxes.push([x, top, long, tall, row, kind, begin, length, name]);
      if (long > 34 && !thin[kind] && !this.compact) this.#name(context, { x, top, long, tall, name: this.data.names[name], kind: this.data.kinds[kind], text });
    }
    context.restore();
  }

  #axis(context, { from, to, scale, width, height, muted, grid }) {
    const raw = (to - from) / Math.max(2, Math.floor((width - this.gutter) / 90));
    const power = 10 ** Math.floor(Math.log10(raw || 1));
    const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= raw) || 1;
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "alphabetic";
    for (let tick = Math.ceil(from / step) * step; tick <= to; tick += step) {
      const x = Math.round(this.gutter + (tick - from) * scale) + 0.5;
      context.fillStyle = grid;
      context.fillRect(x, AXIS - 6, 1, height);
      const words = tick === 0 ? "0" : seconds(tick / 1e6);
      if (x + context.measureText(words).width < width) {
        context.fillStyle = muted;
        context.fillText(words, x - (tick === from ? 0 : 3), AXIS - 10);
      }
    }
  }

  #name(context, { x, top, long, tall, name, kind, text }) {
    const begin = Math.max(x, this.gutter) + 5;
    const room = x + long - begin - 4;
    if (room < 18) return;
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.fillStyle = kind === "wait" ? text : kind === "forward" || kind === "backward" || kind === "update" || kind === "weight gradient" ? "#fff" : "#10151b";
    context.fillText(this.#fit(context, name, room), begin, top + tall / 2 + 0.5);
    context.font = "12px system-ui, sans-serif";
  }

  #fit(context, words, room) {
    if (context.measureText(words).width <= room) return words;
    let kept = words;
    while (kept.length > 1 && context.measureText(`${kept}…`).width > room) kept = kept.slice(0, -1);
    return kept.length > 1 ? `${kept}…` : "";
  }

  #listen() {
    const { canvas } = this;
    const part = (event) => Math.max(0, Math.min(1, (event.offsetX - this.gutter) / (this.box.clientWidth - this.gutter)));
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && document.activeElement !== canvas) return; // the page scrolls
      event.preventDefault();
      if (event.shiftKey) this.move(event.deltaY / 800);
      else this.zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) / 200), part(event));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.drag = { x: event.offsetX, view: this.view };
    });
    canvas.addEventListener("pointermove", (event) => {
      if (this.drag?.view) {
        const [from, to] = this.drag.view;
        const moved = ((event.offsetX - this.drag.x) / (this.box.clientWidth - this.gutter)) * (to - from);
        this.#look(from - moved, to - from);
      } else this.#hover(event);
    });
    const drop = (event) => {
      const begin = this.drag;
      this.drag = null;
      if (begin && !begin.view && Math.abs(event.offsetX - begin.x) > 8 && this.data) { // a range of the whole step
        const ends = [this.time(begin.x), this.time(event.offsetX)].sort((one, other) => one - other);
        this.#look(ends[0], ends[1] - ends[0]);
      }
    };
    canvas.addEventListener("pointerup", drop);
    canvas.addEventListener("pointercancel", () => { this.drag = null; });
    canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; this.onRead(""); });
    canvas.addEventListener("dblclick", () => this.whole());
    canvas.addEventListener("keydown", (event) => {
      const acts = {
        "+": () => this.zoom(0.7), "=": () => this.zoom(0.7), "-": () => this.zoom(1.43), 0: () => this.whole(),
        Escape: () => this.whole(), ArrowLeft: () => this.move(-0.2), ArrowRight: () => this.move(0.2),
      };
      if (!acts[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      acts[event.key]();
    });
  }

  #hover(event) {
    const { offsetX: x, offsetY: y } = event;
    const found = (this.boxes || []).findLast(([left, top, long, tall]) => x >= left - 1 && x <= left + long + 1 && y >= top && y <= top + tall);
    this.tip.hidden = !found;
    if (!found) {
      this.onRead("");
      return;
    }
    const [, , , , row, kind, begin, length, name] = found;
    const { rows, kinds, names } = this.data;
    const words = `${names[name]}\n${kinds[kind]}, ${seconds(length / 1e6)} from ${seconds(begin / 1e6)}`;
    this.tip.textContent = words;
    this.onRead(`${rows[row].process}: ${words.replace("\n", ", ")}`);
    const left = x > this.box.clientWidth / 2 ? x - this.tip.offsetWidth - 12 : x + 14;
    const top = Math.max(0, y - this.scroll.scrollTop + 16);
    this.tip.style.transform = `translate(${Math.max(0, left).toFixed(0)}px, ${top.toFixed(0)}px)`;
  }
}

// The milliseconds of each kind on each device.
export function sums(schedule) {
  const found = new Map();
  for (const [row, kind, , length] of schedule.spans) {
    const { process } = schedule.rows[row];
    if (!found.has(process)) found.set(process, new Array(schedule.kinds.length).fill(0));
    found.get(process)[kind] += length;
  }
  return [...found].map(([process, times]) => ({ process, times }));
}
