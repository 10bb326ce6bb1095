// Texts for numbers, and elements: all text comes from others, so it is only ever set as text.

export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "data") Object.assign(made.dataset, value);
    else if (name === "aria") for (const [key, each] of Object.entries(value)) made.setAttribute(`aria-${key}`, each);
    else if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function known(value) {
  return value !== null && value !== undefined;
}

const whole = new Intl.NumberFormat("en-US");

export function count(value) {
  return known(value) ? whole.format(value) : "–";
}

function digits(value) {
  return value >= 99.95 ? value.toFixed(0) : value >= 9.995 ? value.toFixed(1) : value.toFixed(2);
}

export function loss(value) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  return size === 0 || (size >= 1e-3 && size < 1e5) ? value.toFixed(4) : value.toExponential(3);
}

// A value of an axis, without digits that say nothing.
export function short(value) {
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)) return value.toExponential(0);
  return Number(value.toPrecision(3)).toLocaleString("en-US", { maximumFractionDigits: 6 });
}

export function rate(value) {
  if (!known(value)) return "–";
  return value < 10 ? value.toFixed(1) : whole.format(Math.round(value));
}

export function seconds(value) {
  if (!known(value)) return "–";
  for (const [least, unit] of [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]]) {
    if (value >= least * 0.9995) return `${digits(value / least)} ${unit}`;
  }
  return value < 5e-10 ? "0 µs" : `${digits(value * 1e6)} µs`;
}

export function span(value) {
  if (!known(value)) return "–";
  const all = Math.round(value);
  const hours = Math.floor(all / 3600);
  const pad = (each) => String(each).padStart(2, "0");
  return `${hours}:${pad(Math.floor(all / 60) % 60)}:${pad(all % 60)}`;
}

export function age(value) {
  if (value >= 172800) return `${Math.floor(value / 86400)} days`;
  if (value >= 3600) return `${Math.floor(value / 3600)} h`;
  return value >= 60 ? `${Math.floor(value / 60)} min` : `${Math.round(value)} s`;
}

export function size(value) {
  if (!known(value)) return "–";
  for (const [least, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (value >= least) return `${digits(value / least)} ${unit}`;
  }
  return `${Math.round(value)} B`;
}

export function bitRate(bytes) {
  if (!known(bytes)) return "–";
  for (const [least, unit] of [[1e9, "Gbit/s"], [1e6, "Mbit/s"], [1e3, "kbit/s"]]) {
    if (bytes * 8 >= least) return `${digits((bytes * 8) / least)} ${unit}`;
  }
  return `${Math.round(bytes * 8)} bit/s`;
}

export function percent(value, places = 0) {
  return known(value) ? `${(100 * value).toFixed(places)} %` : "–";
}

export function clock(at) {
  return known(at) ? new Date(at * 1000).toLocaleTimeString("en-GB") : "";
}

// A table whose cells stay where they are: only what has changed is written.
export class Table {
  constructor(parent, columns, { caption = "" } = {}) {
    this.columns = columns;
    this.rows = [];
    const heads = columns.map((each) => element("th", { scope: "col", className: each.className || "" }, each.title));
    this.body = element("tbody");
    this.table = element("table", {}, element("thead", {}, element("tr", {}, ...heads)), this.body);
    if (caption) this.table.prepend(element("caption", {}, caption));
    parent.append(this.table);
  }

  update(values) {
    while (this.rows.length > values.length) this.rows.pop().row.remove();
    values.forEach((value, place) => {
      if (place === this.rows.length) this.rows.push(this.#row());
      const { cells } = this.rows[place];
      this.columns.forEach((column, index) => {
        if (column.fill) column.fill(cells[index], value);
        else setText(cells[index], column.text(value));
      });
    });
  }

  #row() {
    const cells = this.columns.map((each, index) =>
      index === 0
        ? element("th", { scope: "row", className: each.className || "" })
        : element("td", { className: each.className || "" }));
    const row = element("tr", {}, ...cells);
    this.body.append(row);
    return { row, cells };
  }
}

// A bar with a text: the part of a whole in use, and behind it a second, larger part.
export function fillMeter(cell, { value, peak, text, label, kind = "" }) {
  let meter = cell.firstChild;
  if (!meter) {
    const rail = element("span", { className: "rail", role: "img" }, element("i", { className: "peak" }), element("i"));
    meter = element("span", { className: `meter ${kind}` }, rail, element("span", { className: "says" }));
    cell.append(meter);
  }
  const [rail, says] = meter.children;
  const scale = (part) => `scaleX(${known(part) ? Math.max(0, Math.min(1, part)) : 0})`;
  rail.children[0].style.transform = scale(peak);
  rail.children[1].style.transform = scale(value);
  rail.hidden = !known(value) && !known(peak);
  rail.setAttribute("aria-label", `${label} ${text}`);
  setText(says, text);
}
