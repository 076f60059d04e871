"use strict";
// Shows the sections that are in the JSON of the page. Everything from it becomes text nodes, never markup.
(() => {
  const PALETTES = {
    light: ["#1f6fd0", "#d9730d", "#138a66", "#8250d0", "#c93a62", "#6b6b1f", "#0f8aa3", "#9a5b2e"],
    dark: ["#6aa9f5", "#f2a65a", "#4cc9a0", "#b79af5", "#f2809f", "#c9c96a", "#5cc8de", "#d3a27a"],
  };
  const ROWS = 12;
  const MORE_ROWS = 200;
  const isDark = matchMedia("(prefers-color-scheme: dark)");
  const charts = [];
  let headings = 0;

  // makes an element; children are elements or text
  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children.map((child) => (child instanceof Node ? child : String(child))));
    return element;
  };
  // what has no glyph or steers the text is written out
  const printable = (text) =>
    text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g, (c) =>
      "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0")
    );
  // plotly reads a little markup in its labels
  const label = (text) => printable(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const number = (value) => (typeof value === "number" ? value.toLocaleString("en") : printable(String(value)));
  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const framed = (section, ...children) => {
    const frame = make("section");
    if (section.title) frame.append(make("h3", {}, printable(section.title)));
    if (section.note) frame.append(make("p", { class: "note" }, printable(section.note)));
    frame.append(...children);
    return frame;
  };

  const axis = (given) => {
    const line = variable("--line");
    return { gridcolor: line, linecolor: line, zerolinecolor: line, automargin: true, fixedrange: true, ...given };
  };
  const draw = ({ element, section }) => {
    const colors = PALETTES[isDark.matches ? "dark" : "light"];
    const traces = section.traces.map((trace, index) => {
      const color = colors[(trace.color ?? index) % colors.length];
      const { name = "", size = 3, ...rest } = trace;
      delete rest.color;
      const shown = { ...rest, name: label(name), showlegend: section.traces.length > 1 };
      if (trace.type === "bar") shown.marker = { color };
      if (trace.mode?.includes("markers")) shown.marker = { color, size, opacity: 0.7 };
      if (trace.mode?.includes("lines")) shown.line = { color, width: trace.stackgroup ? 0.5 : 2, shape: trace.shape ?? "linear", dash: trace.dash };
      delete shown.shape;
      delete shown.dash;
      return shown;
    });
    const layout = {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: variable("--ink"), family: getComputedStyle(document.body).fontFamily, size: 12 },
      margin: { l: 8, r: 8, t: 8, b: 8 },
      height: section.height ?? 320,
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
      hoverlabel: { namelength: -1 },
      bargap: 0.15,
      hovermode: section.hovermode ?? "closest",
      xaxis: axis(section.xaxis),
      yaxis: axis(section.yaxis),
    };
    Plotly.react(element, traces, layout, { displayModeBar: false, responsive: true });
  };

  const token = (piece, index, specials, targets) => {
    const [text, ...ids] = piece;
    const kind = (ids.some((id) => specials.has(id)) ? "special" : "t" + (index % 2)) + (targets.has(index) ? " target" : "");
    const title = (ids.length > 1 ? "tokens " : "token ") + ids.join(", ") + (targets.has(index) ? ", target" : "");
    const span = make("span", { class: kind, title });
    printable(text).split("\n").forEach((line, place) => {
      if (place) span.append(make("span", { class: "break", "aria-hidden": "true" }, "↵"), "\n");
      span.append(line);
    });
    return span;
  };

  const kinds = {
    heading: (section) => {
      const id = "part-" + headings++;
      document.querySelector("nav").append(make("a", { href: "#" + id }, printable(section.title)));
      return make("h2", { id }, printable(section.title));
    },
    facts: (section) =>
      framed(section, make("dl", {}, ...section.rows.flatMap(([name, value]) =>
        [make("dt", {}, printable(name)), make("dd", {}, printable(value))]
      ))),
    chart: (section) => {
      const element = make("div", { class: "chart", role: "img", "aria-label": section.title });
      charts.push({ element, section });
      return framed(section, element);
    },
    tokens: (section) => {
      const specials = new Set(section.specials);
      return framed(section, ...section.items.map((item, place) => {
        const details = make("details", place ? {} : { open: "" }, make("summary", {}, printable(item.title)));
        for (const part of item.parts) {
          if (part.title) details.append(make("p", { class: "piece" }, printable(part.title)));
          const targets = new Set(part.targets);
          details.append(make("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": "tokens" },
            ...part.pieces.map((piece, index) => token(piece, index, specials, targets))));
        }
        return details;
      }));
    },
    table: (section) => {
      let rows = section.rows;
      let shown = section.search ? ROWS : Infinity;
      let order = null;
      const body = make("tbody");
      const status = make("span", { class: "note", role: "status", style: "margin:0" });
      const more = make("button", { class: "more", type: "button" }, "Show more");
      const largest = section.columns.map((column, place) =>
        column.bar ? Math.max(...section.rows.map((row) => row[place])) : 0
      );
      const cell = (value, column, place) => {
        const text = column.percent ? (100 * value).toFixed(2) + "%" : number(value);
        if (column.bar) {
          const bar = make("span", { class: "bar", "aria-hidden": "true" });
          bar.style.width = `calc(${value / largest[place]} * var(--bar))`;
          return make("td", {}, bar, " " + text);
        }
        const kind = column.number ? "number" : column.token ? "token" : "";
        return make("td", { class: kind }, column.code ? make("code", {}, text.replace(/\n/g, "\\n").replace(/\t/g, "\\t")) : text);
      };
      const fill = () => {
        body.replaceChildren(...rows.slice(0, shown).map((row) =>
          make("tr", {}, ...row.map((value, place) => cell(value, section.columns[place], place)))
        ));
        more.hidden = rows.length <= shown;
        status.textContent = number(Math.min(shown, rows.length)) + " of " + number(rows.length) +
          (rows.length < section.rows.length ? " that match, of " + number(section.rows.length) : "");
      };
      const heads = section.columns.map((column, place) => {
        const button = make("button", { type: "button" }, column.name);
        const head = make("th", { scope: "col", class: column.number ? "number" : "" }, button);
        button.addEventListener("click", () => {
          const down = order === null || order.place !== place ? Boolean(column.number) : !order.down;
          order = { place, down };
          heads.forEach((other) => other.removeAttribute("aria-sort"));
          head.setAttribute("aria-sort", down ? "descending" : "ascending");
          sift();
        });
        return head;
      });
      const search = make("input", { type: "search", placeholder: section.search ?? "", "aria-label": section.search ?? "" });
      const sift = () => {
        const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
        rows = section.rows.filter((row) => {
          const text = row.join(" ").toLowerCase();
          return words.every((word) => text.includes(word));
        });
        if (order !== null) {
          const { place, down } = order;
          const sign = down ? -1 : 1;
          // figures may be texts of fixed decimals, or empty
          const value = (row) => (section.columns[place].number && !isNaN(row[place]) ? Number(row[place]) : row[place]);
          rows = [...rows].sort((a, b) => sign * (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0));
        }
        shown = ROWS;
        fill();
      };
      search.addEventListener("input", sift);
      more.addEventListener("click", () => { shown += MORE_ROWS; fill(); });
      fill();
      const table = make("table", {}, make("thead", {}, make("tr", {}, ...heads)), body);
      const wrapped = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": section.title }, table);
      return section.search
        ? framed(section, make("div", { class: "search" }, search, status), wrapped, more)
        : framed(section, wrapped, more);
    },
  };

  const { sections } = JSON.parse(document.getElementById("data").textContent);
  document.querySelector("main").append(...sections.map((section) => kinds[section.kind](section)));
  charts.forEach(draw);
  isDark.addEventListener("change", () => charts.forEach(draw));
  document.documentElement.dataset.ready = "yes";
})();
