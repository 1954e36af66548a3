// Keeps the page's files, so that it opens without a network after the first time.
const FILES = ["./", "index.html", "model.js", "runtime.js", "predict.js", "page.js"];
self.addEventListener("install", (event) => event.waitUntil(caches.open("vqprompt").then((cache) => cache.addAll(FILES))));
self.addEventListener("fetch", (event) =>
  event.respondWith(fetch(event.request).catch(() => caches.match(event.request, { ignoreSearch: true }))));
