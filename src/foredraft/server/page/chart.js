// Bars: the share of drafting steps whose path reached each position.
const NS = "http://www.w3.org/2000/svg";

function add(svg, name, attributes, text) {
  const node = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  svg.append(node);
}

export function draw(svg, acceptedAt, steps) {
  svg.replaceChildren();
  const shares = acceptedAt.map((count) => (steps ? count / steps : 0));
  const width = 280 / Math.max(shares.length, 4);
  for (const level of [0, 0.5, 1]) {
    const y = 120 - 105 * level;
    add(svg, "line", { x1: 34, x2: 318, y1: y, y2: y });
    add(svg, "text", { x: 30, y: y + 4, "text-anchor": "end" }, `${level * 100}%`);
  }
  shares.forEach((share, i) => {
    const x = 38 + i * width;
    add(svg, "rect", { x, y: 120 - 105 * share, width: Math.max(width - 4, 2), height: 105 * share });
    if (shares.length <= 10 || i % 2 === 0) add(svg, "text", { x: x + (width - 4) / 2, y: 136, "text-anchor": "middle" }, i + 1);
  });
  const said = shares.map((share, i) => `${i + 1}: ${Math.round(share * 100)} %`).join(", ");
  svg.setAttribute("aria-label", `Acceptance by position: ${said || "no draft was accepted"}`);
}
