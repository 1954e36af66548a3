"use strict";
const at = (id) => document.getElementById(id);
const SHOWN = 5;
let stream = null;

function show({ probabilities, familiarity }) {
  const best = probabilities.map((share, i) => [share, vqprompt.classes[i], vqprompt.notes[i]]).sort((a, b) => b[0] - a[0]).slice(0, SHOWN);
  const known = familiarity >= 0; // percentages are shares among known classes
  const [, answer, note] = best[0];
  at("state").textContent = !known ? "Unknown: unlike everything that was taught. Most like:" : note ? `${answer} (${note})` : answer;
  at("answers").replaceChildren(...best.map(([share, name]) => {
    const item = document.createElement("li");
    const label = Object.assign(document.createElement("span"), { textContent: name });
    const percent = Object.assign(document.createElement("output"), { textContent: `${(100 * share).toFixed(1)} %` });
    const meter = Object.assign(document.createElement("meter"), { value: share, ariaLabel: name });
    item.append(label, ...(known && !note ? [percent, meter] : []));
    return item;
  }));
}

async function ask(image) {
  try {
    show(await vqprompt.predict(image));
  } catch (error) {
    at("state").textContent = `This cannot be read as an image (${error.message})`;
    at("answers").replaceChildren();
  }
}

async function choose(file) {
  if (!file) return;
  stopCamera();
  at("shown").src = URL.createObjectURL(file);
  at("shown").hidden = false;
  at("state").textContent = "Looking …";
  await ask(file);
}

function stopCamera() {
  stream?.getTracks().forEach((track) => track.stop());
  stream = null;
  at("video").hidden = true;
  at("camera").textContent = "Camera";
}

async function startCamera() {
  try {
    stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
  } catch (error) {
    at("state").textContent = `No camera (${error.message}); choose a photograph instead`;
    return;
  }
  at("shown").hidden = true;
  at("video").hidden = false;
  at("video").srcObject = stream;
  at("camera").textContent = "Stop";
  await at("video").play();
  while (stream) await ask(at("video"));
}

at("file").onchange = (event) => choose(event.target.files[0]);
at("camera").onclick = () => (stream ? stopCamera() : startCamera());
at("zone").ondragover = (event) => { event.preventDefault(); at("zone").classList.add("over"); };
at("zone").ondragleave = () => at("zone").classList.remove("over");
at("zone").ondrop = (event) => {
  event.preventDefault();
  at("zone").classList.remove("over");
  choose(event.dataTransfer.files[0]);
};
vqprompt.ready.then(
  () => { at("state").textContent = `Ready: knows ${vqprompt.classes.length} class${vqprompt.classes.length === 1 ? "" : "es"}`; },
  (error) => { at("state").textContent = `The model cannot be opened (${error.message})`; },
);
if (location.protocol.startsWith("http")) navigator.serviceWorker?.register("offline.js"); // later without a network
