"use strict";
const page = JSON.parse(document.getElementById("data").textContent);
const make = (parent, tag, attributes = {}, text = "") => {
  const isSvg = parent.namespaceURI.endsWith("svg") || tag === "svg";
  const node = isSvg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text) node.textContent = text;
  return parent.appendChild(node);
};
const showTip = (event, text) => {
  const tip = document.getElementById("tip");
  tip.textContent = text;
  tip.style.display = "block";
  tip.style.left = `${Math.max(0, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${Math.max(0, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8))}px`;
};
const hideTip = () => { document.getElementById("tip").style.display = "none"; };
