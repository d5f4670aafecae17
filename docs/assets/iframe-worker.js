// Pages that are opened from disk may not start workers, and the theme's search is one. Here it runs in a hidden frame
// instead. The theme would load such a script from another machine; its plugin `offline` leaves that when it finds
// one whose name has "iframe-worker" in it.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.frame.title = "search"
      document.body.append(this.frame)
      const inside = this.frame.contentWindow
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.ready = new Promise(loaded => {
        const script = inside.document.createElement("script")
        script.src = url
        script.onload = loaded
        inside.document.body.append(script)
      })
    }

    postMessage(data) {
      const inside = this.frame.contentWindow
      this.ready.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
