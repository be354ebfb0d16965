// Set the theme before the page is drawn, so that it does not flash.
(() => {
  let saved = null;
  try {
    saved = localStorage.getItem("gracetune-theme");
  } catch {
    // Storage is off, or the page is a local file: follow the system.
  }
  if (saved === "light" || saved === "dark") document.documentElement.dataset.theme = saved;
})();
