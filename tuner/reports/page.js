"use strict";
// Colours stand in the figures as $names of the style sheet's variables, so that a plot follows the theme.
const style = () => getComputedStyle(document.documentElement);
const coloured = (value, css, key) => {
  if (typeof value === "string") return /color$/.test(key) && value[0] === "$" ? css.getPropertyValue("--" + value.slice(1)).trim() : value;
  if (Array.isArray(value)) return value.map((item) => coloured(item, css, key));
  if (value && typeof value === "object")
    return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, coloured(item, css, name)]));
  return value;
};
const axis = (own, css) => ({
  gridcolor: css.getPropertyValue("--line").trim(), zeroline: false, automargin: true, linecolor: css.getPropertyValue("--line").trim(),
  fixedrange: false, ...own, title: { standoff: 8, ...(own || {}).title },
});
const draw = (name) => {
  const place = document.getElementById("plot-" + name);
  const figure = FIGURES[name], css = style(), layout = coloured(figure.layout, css);
  const narrow = place.clientWidth < 420;
  const legend = { orientation: "h", y: -0.2, yanchor: "top", x: 0, font: { size: narrow ? 10 : 12 }, ...layout.legend };
  return Plotly.react(place, coloured(figure.data, css), {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", height: figure.height + (narrow && layout.showlegend !== false ? 40 : 0),
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: css.getPropertyValue("--ink").trim() },
    hovermode: "closest", showlegend: figure.data.length > 1, ...layout, legend, margin: { l: 8, r: 12, t: 10, b: 8, ...layout.margin },
    hoverlabel: { bgcolor: css.getPropertyValue("--card").trim(), bordercolor: css.getPropertyValue("--line").trim(),
      font: { color: css.getPropertyValue("--ink").trim() }, align: "left" },
    xaxis: axis(layout.xaxis, css), yaxis: axis(layout.yaxis, css), dragmode: narrow ? false : "zoom",
  }, { responsive: true, displaylogo: false, displayModeBar: false, scrollZoom: false });
};
const seen = new Set();
const watcher = new IntersectionObserver((entries) => entries.forEach((entry) => {
  const name = entry.target.id.slice(5);
  if (entry.isIntersecting && !seen.has(name)) { seen.add(name); draw(name); }
}), { rootMargin: "600px" });
document.querySelectorAll(".plot").forEach((place) => watcher.observe(place));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => seen.forEach(draw));
addEventListener("beforeprint", () => Object.keys(FIGURES).forEach((name) => { seen.add(name); draw(name); }));
document.querySelectorAll(".sortable").forEach((table) => table.tHead.addEventListener("click", (event) => {
  const column = event.target.closest("th").cellIndex, body = table.tBodies[0];
  const sign = table.dataset.column == column && table.dataset.sign == 1 ? -1 : 1;
  const key = (row) => row.cells[column].dataset.key ?? row.cells[column].textContent;
  const rank = (a, b) => (a === "") - (b === "") || sign * (a !== "" && b !== "" && !isNaN(a) && !isNaN(b) ? a - b : a.localeCompare(b));
  body.append(...[...body.rows].sort((a, b) => rank(key(a), key(b))));
  table.dataset.column = column; table.dataset.sign = sign;
}));
