// Asks for what has changed while somebody looks. The answer's HTML has every text of a model escaped.
const line = document.getElementById("status");
const run = document.getElementById("run");

async function poll() {
  if (!document.hidden) {
    try {
      const address = "state.json?known=" + run.dataset.key;
      const state = await (await fetch(address, { cache: "no-store", signal: AbortSignal.timeout(20000) })).json();
      line.textContent = state.status;
      if (state.key !== run.dataset.key) {
        run.dataset.key = state.key;
        run.innerHTML = state.body;
      }
    } catch {
      line.textContent = "No answer: the run has ended, and its folder has report.html. Below is what it showed last.";
    }
  }
  setTimeout(poll, 3000);
}

poll();
