"use strict";
// Sorting, downloads and choices of the report. Without it the page shows all its text, figures and tables.
const data = JSON.parse(document.getElementById("data").textContent);

function made(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  Object.assign(element, attributes);
  element.append(...children);
  return element;
}

function choice(label, names, changed) {
  const select = made("select", {}, ...names.map((name, index) => made("option", { value: index }, name)));
  select.addEventListener("change", () => changed(Number(select.value)));
  return { select, element: made("label", { className: "choice" }, label + " ", select) };
}

function breakable(text) {
  return text.split("_").flatMap((part, index) => (index ? ["_", made("wbr"), part] : [part]));
}

const decimals = (value) => (value === null || value === undefined ? "-" : value.toFixed(3).replace(/^0\./, "."));

function band(value) {
  return value === null ? "" : "b" + data.bands.findLastIndex((bound) => value + 1e-9 >= bound);
}

function worth(cell) {
  const text = cell.dataset.v ?? cell.textContent.trim().replaceAll(",", "");
  return text === "" || Number.isNaN(Number(text)) ? text : Number(text);
}

function compare(left, right, falling) {
  if (typeof left !== typeof right) return typeof left === "number" ? -1 : 1; // what is missing stays last
  const order = typeof left === "number" ? left - right : left.localeCompare(right);
  return falling ? -order : order;
}

function sortable(table) {
  const headings = [...table.tHead.rows[0].cells], body = table.tBodies[table.tBodies.length - 1];
  headings.forEach((heading, column) => {
    const button = made("button", { type: "button", title: "sort by this column" }, ...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const rows = [...body.rows].map((row) => [worth(row.cells[column]), row]), sorted = heading.getAttribute("aria-sort");
      // numbers from the largest first, names of rows from the first; a second click turns them
      const falling = sorted ? sorted === "ascending" : column > 0 && rows.some(([value]) => typeof value === "number");
      for (const each of headings) each.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", falling ? "descending" : "ascending");
      rows.sort(([left], [right]) => compare(left, right, falling));
      body.append(...rows.map(([, row]) => row));
    });
  });
}

function download(table) {
  const quoted = (text) => '"' + String(text).replaceAll('"', '""') + '"';
  const lines = [...table.rows].map((row) => [...row.cells].map((cell) => quoted(cell.dataset.v ?? cell.innerText.trim())));
  const link = made("a", {
    href: URL.createObjectURL(new Blob([lines.map((line) => line.join(",")).join("\r\n") + "\r\n"], { type: "text/csv" })),
    download: table.caption.textContent.trim().replaceAll(/[^\w@.]+/g, "-") + ".csv",
  });
  link.click();
  URL.revokeObjectURL(link.href);
}

function ready(table) {
  sortable(table);
  const button = made("button", { type: "button", className: "csv" }, "CSV");
  button.setAttribute("aria-label", "download as CSV: " + table.caption.textContent.trim());
  button.addEventListener("click", () => download(table));
  table.parentElement.after(button);
}

function fill(cell, value) {
  cell.textContent = decimals(value);
  cell.className = band(value);
  if (value === null) delete cell.dataset.v;
  else cell.dataset.v = value;
}

function heatMap() {
  const table = document.getElementById("heat"), names = Object.keys(data.heat);
  const chance = table.tFoot;
  const show = (index) => {
    const metric = data.heat[names[index]];
    table.caption.textContent = names[index] + " of each layer";
    for (const row of [...table.tBodies].flatMap((body) => [...body.rows])) {
      data.predictors.forEach((name, column) => fill(row.cells[column + 1], (metric.values[name] ?? [])[row.dataset.at] ?? null));
    }
    chance.hidden = metric.chance === null;
    if (!chance.hidden) for (const cell of [...chance.rows[0].cells].slice(1)) fill(cell, metric.chance);
  };
  const { element } = choice("number", names, show);
  table.parentElement.before(element);
}

function passages() {
  const box = document.getElementById("passages");
  if (!box) return;
  let predictor = data.predictors.indexOf(data.chosen), layer = 0;
  const show = () => {
    document.querySelectorAll("#passages p.text").forEach((text, index) => {
      const found = data.passages[index][data.predictors[predictor]];
      [...text.children].forEach((token, at) => {
        const own = layer ? [found[layer - 1][at]] : found.map((row) => row[at]);
        const mean = own.reduce((sum, value) => sum + value, 0) / own.length;
        token.className = band(mean / data.k);
        token.title = `${layer ? mean : mean.toFixed(1)} of ${data.k}`;
      });
    });
  };
  const by = choice("predictor", data.predictors, (index) => { predictor = index; show(); });
  by.select.value = predictor;
  const at = choice("layer", ["mean of all", ...data.targets], (index) => { layer = index; show(); });
  box.prepend(made("div", {}, by.element, at.element));
}

function experts() {
  const box = document.getElementById("experts");
  if (!box) return;
  const { used, found } = data.experts, place = made("div", {});
  const show = (layer) => {
    const heads = ["expert", "tokens", "share of tokens", ...data.predictors];
    const table = made("table", {}, made("caption", {}, `experts of layer ${data.targets[layer]}`),
      made("thead", {}, made("tr", {}, ...heads.map((head) => made("th", { scope: "col" }, ...breakable(head))))), made("tbody"));
    used[layer].forEach((count, expert) => {
      const number = (value) => { const cell = made("td"); fill(cell, value); return cell; };
      const share = made("td", {}, decimals(count / data.tokens));
      const recall = data.predictors.map((name) => number(count ? found[name][layer][expert] / count : null));
      table.tBodies[0].append(made("tr", {}, made("th", { scope: "row" }, String(expert)),
        made("td", {}, count.toLocaleString("en")), share, ...recall));
    });
    const wide = made("div", { className: "wide tall", tabIndex: 0 }, table);
    place.replaceChildren(wide);
    ready(table);
  };
  box.append(choice("experts of layer", data.targets, show).element, place);
  show(0);
}

document.querySelectorAll("table.sortable").forEach(ready);
heatMap();
passages();
experts();
