/* Before anything is painted: the theme that was chosen, where it is not the system's. */
"use strict";
try {
  const theme = localStorage.getItem("cheetah.theme");
  if (theme) document.documentElement.dataset.theme = theme;
} catch {} // the browser keeps nothing for this page
