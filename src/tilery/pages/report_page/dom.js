"use strict";
// Elements, and moving among them by keyboard.

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.entries(value).forEach(([key, one]) => node.style.setProperty(key, one));
    else node.setAttribute(name, value === true ? "" : value);
  }
  const kept = children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
  node.append(...kept);
  return node;
}

function html(name, attributes, ...children) {
  return fill(document.createElement(name), attributes, children);
}

function svg(name, attributes, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function byId(id) {
  return document.getElementById(id);
}

/** Names and values; what has no value is left out. */
function factList(facts) {
  const said = facts.filter(([, value]) => value);
  const pairs = said.map(([name, value]) => html("div", {}, html("dt", {}, name), html("dd", {}, value)));
  return html("dl", { class: "facts" }, pairs);
}

/** One tab stop for many marks: arrows go on and back, Home and End to the ends. */
function roving(container, selector) {
  const marks = [...container.querySelectorAll(selector)];
  marks.forEach((mark, i) => mark.setAttribute("tabindex", i ? "-1" : "0"));
  container.addEventListener("keydown", (event) => {
    const at = marks.indexOf(document.activeElement);
    const last = marks.length - 1;
    const goals = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: last };
    const to = goals[event.key];
    if (at < 0 || to === undefined || !marks[to]) return;
    event.preventDefault();
    marks[at].setAttribute("tabindex", "-1");
    marks[to].setAttribute("tabindex", "0");
    marks[to].focus();
  });
}

/** Says more of a mark on hover and on focus; a click or Enter opens its row in the table. */
function explained(mark, lines, row, open = openRow) {
  const show = () => showTip(mark, lines());
  mark.addEventListener("mouseenter", show);
  mark.addEventListener("focus", show);
  mark.addEventListener("mouseleave", hideTip);
  mark.addEventListener("blur", hideTip);
  mark.addEventListener("click", () => open(row));
  mark.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    open(row);
  });
  return mark;
}

let tipped = null; // the mark that the tip is of

function showTip(mark, [title, ...lines]) {
  const tip = byId("tip");
  tip.replaceChildren(html("strong", {}, title), ...lines.filter(Boolean).map((line) => html("div", {}, line)));
  tip.hidden = false;
  tipped = mark;
  placeTip();
}

function placeTip() {
  const tip = byId("tip");
  const at = tipped.getBoundingClientRect();
  const size = tip.getBoundingClientRect();
  const left = Math.min(Math.max(8, at.left + at.width / 2 - size.width / 2), innerWidth - size.width - 8);
  const above = at.top - size.height - 10;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 8 ? above : at.bottom + 10}px`;
}

function hideTip() {
  byId("tip").hidden = true;
  tipped = null;
}

/** A mark that has the focus may have scrolled into view by it: its tip goes along. */
function moveTip() {
  if (tipped && tipped === document.activeElement) placeTip();
  else hideTip();
}
