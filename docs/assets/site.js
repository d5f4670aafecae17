// What the theme leaves out for people who read with keys or ears.
addEventListener("load", () => {
  const give = (found, name, value) => document.querySelectorAll(found).forEach((each) => each.setAttribute(name, value));
  give(".sidebar-drawer", "aria-label", "Pages");
  give(".toc-drawer", "aria-label", "Headings of this page");
  give("[role=heading]:not([aria-level])", "aria-level", "2");
  for (const each of document.querySelectorAll("dt.sig dl")) {
    const name = document.createElement("dt");
    name.className = "visually-hidden";
    name.textContent = "arguments";
    each.prepend(name);
  }
  for (const each of document.querySelectorAll("th"))
    if (!each.textContent.trim()) each.replaceWith(document.createElement("td"));
  for (const each of document.querySelectorAll("pre, .table-wrapper, .math mjx-container"))
    if (each.scrollWidth > each.clientWidth) each.tabIndex = 0;
});
