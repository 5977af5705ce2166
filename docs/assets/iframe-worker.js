// Browsers refuse workers in pages opened from disk (file://), and the search of this site runs in one.
// On such pages a hidden frame takes the worker's place. Pages from a web server keep real workers.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.target = frame.contentWindow
      window.addEventListener("message", (event) => {
        if (event.source === this.target) this.dispatchEvent(new MessageEvent("message", { data: event.data }))
      })
      this.ready = new Promise((resolve) => (frame.contentWindow.workerIsReady = resolve))
      frame.contentDocument.open()
      frame.contentDocument.write(`<!doctype html><body><script>
        window.postMessage = (data) => parent.postMessage(data, "*")
        window.importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done, failed) => {
          const script = document.createElement("script")
          script.src = url
          script.onload = done
          script.onerror = failed
          document.body.appendChild(script)
        })), Promise.resolve())
      <\/script><script src="${url}" onload="workerIsReady()"><\/script>`)
      frame.contentDocument.close()
    }

    postMessage(data) {
      this.ready.then(() => this.target.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
  window.Worker = window.IFrameWorker
}
