// Keeps the page's files as they were when they were last fetched, so that it opens without a network.
const FILES = ["./", "index.html", "model.js", "runtime.js", "predict.js", "page.js"];
self.addEventListener("install", (event) => event.waitUntil(caches.open("vqprompt").then((cache) => cache.addAll(FILES))));
self.addEventListener("fetch", (event) => event.respondWith(fetch(event.request).then((response) => {
  if (response.ok && event.request.method === "GET") {
    const copy = response.clone();
    event.waitUntil(caches.open("vqprompt").then((cache) => cache.put(event.request, copy)));
  }
  return response;
}).catch(() => caches.match(event.request, { ignoreSearch: true }))));
