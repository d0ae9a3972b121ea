// The page: its panels, the key if the server asks for one, and the notice while the server does not answer.
import {key, onKey, patiently, Problem} from "./service.js";
import {$, all, models, Notice} from "./parts.js";
import {Completion} from "./completion.js";
import {Viewer} from "./gallery.js";
import {Now, served} from "./now.js";
import {Race} from "./race.js";
import {Samples} from "./samples.js";

const PANELS = ["samples", "completion", "race", "now"];
const notice = new Notice($("page-notice"));
let latest = null;  // the last status of the service; null while it does not answer

const viewer = new Viewer({
  reuse(record) {
    (record.about.given ? completion : samples).reuse(record);
  },
  complete(record) {
    select("completion");
    if (record.about.given) completion.pin(record);
    else completion.adopt(record);
  },
  judge(record) {
    select("completion");
    completion.judge(record);
  },
});
const samples = new Samples(viewer);
const completion = new Completion(viewer);
const race = new Race();
const now = new Now({heard, lost});

function select(name) {
  for (const panel of PANELS) {
    const tab = $(`tab-${panel}`);
    tab.setAttribute("aria-selected", String(panel === name));
    tab.tabIndex = panel === name ? 0 : -1;
    $(panel).hidden = panel !== name;
  }
  if (named() !== name) history.replaceState(null, "", `#/${name}`);  // not an id: the browser would scroll there
  if (!latest) return;
  if (name === "samples") samples.arrive(location.hash.split("?")[1] ?? "");
  if (name === "race") race.open(latest.comparison);
}

const named = () => PANELS.find((panel) => location.hash.split("?")[0] === `#/${panel}`) ?? "samples";

const tabs = document.querySelector("[role=tablist]");
tabs.onclick = ({target}) => { if (target.role === "tab") select(target.getAttribute("aria-controls")); };
tabs.onkeydown = (event) => {
  const at = PANELS.indexOf(named());
  const to = {ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: PANELS.length - 1}[event.key];
  if (to === undefined) return;
  event.preventDefault();
  const panel = PANELS[(to + PANELS.length) % PANELS.length];
  select(panel);
  $(`tab-${panel}`).focus();
};
addEventListener("hashchange", () => select(named()));

for (const output of all("output[data-of]")) {
  const range = output.closest("form").elements[output.dataset.of];
  range.oninput = () => { output.textContent = range.valueAsNumber.toFixed(2); };
}

async function heard(status) {
  const same = latest && served(latest) === served(status);
  if (!same) models.set((await patiently("v1/models")).data, status.limits);  // the server came back, or has other models
  latest = status;
  if (same) return;
  notice.clear();
  document.dispatchEvent(new Event("back"));
  race.limit(status.limits.compare_budget);
  select(named());
  document.documentElement.dataset.ready = "";
  performance.mark("ready");
}

function lost(problem) {
  if (problem.code === "unreachable") problem = new Problem("The server does not answer. Start it with “make run”; this page then continues.");
  if (latest || notice.box.hidden) notice.show(problem);  // only once: screen readers read it aloud
  latest = null;
}

// One dialog, however many requests were refused. A request refused with an older key is sent with the newer one.
let asking = null;
onKey.ask = (tried) => {
  if (key.get() !== tried) return Promise.resolve();
  asking ??= new Promise((resolve) => {
    const dialog = $("key");
    $("key-why").textContent = tried ? "The server does not know that key. Enter another one."
      : "Enter one of its API keys. It stays in this tab until you close it.";
    dialog.oncancel = (event) => event.preventDefault();
    dialog.onclose = () => {
      key.set($("key-value").value.trim());
      $("key-value").value = "";
      asking = null;
      resolve();
    };
    dialog.showModal();
  });
  return asking;
};

select(named());
now.poll();
