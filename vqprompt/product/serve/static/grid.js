// Images in a grid, of which some are selected: by click, Shift+click, and with the keyboard.

import { fill, h } from "./dom.js";

export class Grid {
  /** label: what the grid is called. selected: called when the selection changes, or another image has the focus. keys:
   * {key: function}, what other keys do. */
  constructor(label, { selected = () => {}, keys = {} } = {}) {
    this.chosen = new Set();
    this.focused = null;
    this.tell = selected;
    this.keys = keys;
    this.cells = [];
    this.element = h("div", { class: "grid", role: "group", "aria-label": label, onkeydown: (event) => this.key(event) });
  }

  /** items: [{key, label, image, caption, class}]. image: a function that makes its <img>, called once per key. */
  show(items) {
    this.made ??= new Map();
    this.cells = items.map(({ key, label, image, caption, ...more }) => {
      if (!this.made.has(key)) {
        const cell = h("button", { type: "button", onclick: (event) => this.click(key, event), onfocus: () => this.focus(key) }, image());
        cell.append(h("span", { class: "caption" }));
        this.made.set(key, cell);
      }
      const cell = this.made.get(key);
      cell.className = `cell ${more.class ?? ""}`;
      cell.setAttribute("aria-label", label);
      fill(cell.lastChild, caption);
      return { key, cell };
    });
    const order = this.cells.map((c) => c.cell);
    if (order.length !== this.element.children.length || order.some((cell, n) => cell !== this.element.children[n])) fill(this.element, order);
    for (const key of this.chosen) if (!items.some((item) => item.key === key)) this.chosen.delete(key);
    this.mark();
  }

  mark() {
    const tabStop = this.cells.some((c) => c.key === this.focused) ? this.focused : this.cells[0]?.key;
    for (const { key, cell } of this.cells) {
      cell.setAttribute("aria-pressed", String(this.chosen.has(key)));
      cell.tabIndex = key === tabStop ? 0 : -1;
    }
    this.tell([...this.chosen], this.focused);
  }

  select(keys) {
    this.chosen = new Set(keys);
    this.mark();
  }

  focus(key) {
    this.focused = key;
    this.mark();
  }

  click(key, event) {
    const places = [this.anchor ?? key, key].map((k) => this.cells.findIndex((c) => c.key === k));
    if (event.shiftKey) for (const c of this.cells.slice(Math.min(...places), Math.max(...places) + 1)) this.chosen.add(c.key);
    else if (!this.chosen.delete(key)) this.chosen.add(key);
    this.anchor = key;
    this.mark();
  }

  key(event) {
    const place = this.cells.findIndex((c) => c.key === this.focused);
    const columns = this.cells.filter((c) => c.cell.offsetTop === this.cells[0].cell.offsetTop).length;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
    if (step) this.cells[Math.max(0, Math.min(this.cells.length - 1, place + step))].cell.focus();
    else if (event.key === "a" && (event.ctrlKey || event.metaKey)) this.select(this.cells.map((c) => c.key));
    else if (this.keys[event.key] && !event.ctrlKey && !event.metaKey) this.keys[event.key]();
    else return;
    event.preventDefault();
  }
}
