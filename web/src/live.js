// Live data. One event stream serves all tabs of a browser: HTTP/1.1 allows six connections to a host, and the stream
// of a seventh tab would block its requests. The tab that holds the lock listens and passes the events on. Without
// the lock (no TLS, and not this machine) each visible tab polls.
import { effect } from '@preact/signals'
import { get, page, request, shown } from './api.js'
import { append, unframe } from './heat.js'
import * as state from './state.js'

const POLL_MS = 2000
export const COLUMNS = 600
const WINDOW_MS = COLUMNS * 1000
const FEWEST_COLUMNS = 120
const MINUTE_MS = 60_000
const bus = typeof BroadcastChannel === 'undefined' ? null : new BroadcastChannel('stallscope')
const EVENTS = ['job', 'gone', 'health', 'tick', 'signed_out', 'failed']

if (bus) bus.onmessage = ({ data }) => take(data)

function take({ type, data }) {
  state.isConnected.value = type !== 'lost'
  if (type === 'signed_out') state.about.value = { ...state.about.value, user: null }
  if (state.isPaused.value) return
  const rows = state.rows.value ?? []
  if (type === 'job') {
    const at = rows.findIndex(row => row.job === data.job)
    state.rows.value = at < 0 ? [...rows, data] : rows.with(at, data)
  } else if (type === 'gone') state.rows.value = rows.filter(row => row.job !== data)
  else if (type === 'health') state.health.value = data
  else if (type === 'failed') state.problem.value = data
}

export async function loadJobs() {
  const answer = await get('/api/v1/page/jobs')
  state.rows.value = answer.rows
  state.incidents.value = answer.incidents
  state.health.value = answer.health
  state.isConnected.value = true
}

let isListening = false
function listen() {
  if (isListening || state.snapshot || !state.user.value) return
  isListening = true
  // A share link sees one job; the list is not its to load.
  if (!state.user.value.job) shown(loadJobs)
  if (navigator.locks && bus) navigator.locks.request('stallscope-stream', stream)
  else setInterval(poll, POLL_MS)
}

const stream = () =>
  new Promise(() => {
    let source
    const open = () => {
      source = new EventSource('/api/v1/page/stream')
      for (const type of EVENTS)
        source.addEventListener(type, event => {
          const message = { type, data: JSON.parse(event.data) }
          take(message)
          bus.postMessage(message)
          if (type === 'signed_out') source.close()
        })
      source.onerror = () => {
        take({ type: 'lost' })
        bus.postMessage({ type: 'lost' })
        // The browser reconnects by itself, except after an answer such as 401 or 503.
        if (source.readyState === EventSource.CLOSED) setTimeout(reopen, POLL_MS)
      }
    }
    const reopen = () => (state.user.value ? open() : setTimeout(reopen, POLL_MS))
    open()
    effect(() => {
      if (state.user.value && source.readyState === EventSource.CLOSED) open()
    })
  })

async function poll() {
  if (state.isPaused.value || document.hidden || !state.user.value || state.user.value.job) return
  try {
    await loadJobs()
  } catch {
    state.isConnected.value = false
  }
}

/** The window without a chosen time: the last ten minutes of the job, or of a young job its time so far. */
function liveWindow(row) {
  const now = Math.floor(Date.now() / 1000) * 1000
  const begin = Math.floor((row?.first_ms ?? 0) / 1000) * 1000
  const hasEnded = row?.last_ms && (row.ended_ms || now - row.last_ms > WINDOW_MS / 2)
  if (hasEnded) {
    const to = Math.ceil(row.last_ms / 1000) * 1000 + 1000
    return { from: Math.max(to - WINDOW_MS, begin), to, hasEnded }
  }
  const length = Math.min(WINDOW_MS, (Math.floor((now - begin) / MINUTE_MS) + 2) * MINUTE_MS)
  return { from: now - length, to: now }
}

let nMapRequests = 0
/** Loads the heat map of the link: its window, or the last ten minutes. */
export async function loadMap(key, from, to) {
  const mine = ++nMapRequests
  const live = liveWindow(state.job.value ?? state.overview.value?.job)
  const end = to ? +to : live.to
  const begin = from ? +from : to ? end - WINDOW_MS : live.from
  // Memory holds whole seconds; a window of less than two minutes comes from the stored rows, with finer columns.
  const n = Math.min(COLUMNS, Math.max(FEWEST_COLUMNS, Math.floor((end - begin) / 1000)))
  performance.mark('map-request')
  const answer = await request(page('matrix', { job: key, from: begin, to: end, n }))
  const buffer = await answer.arrayBuffer()
  performance.mark('map-data')
  if (mine !== nMapRequests) return
  state.map.value = { ...unframe(buffer), job: key, followed_ms: end }
}

/** No column moves under the pointer: set while the pointer or the keyboard marks a cell. */
export const hold = { isOn: false }

async function follow() {
  const map = state.map.value
  const isLive = map && map.bucket_ms === 1000 && !state.snapshot && !state.isPaused.value && !document.hidden && state.user.value
  if (isLive && !state.query.value.get('to') && !hold.isOn && map.job === state.jobKey.value) {
    const { from, to, hasEnded } = liveWindow(state.job.value)
    // Rounds of the last seconds may still be incomplete, so these columns are requested again.
    const n = Math.max(1, Math.min(COLUMNS, Math.ceil((to - map.followed_ms) / 1000) + 8))
    try {
      const answer = await request(page('matrix', { job: map.job, from: to - n * 1000, to, n }))
      const more = unframe(await answer.arrayBuffer())
      if (state.map.value !== map || state.isPaused.value) {
        // Another map was opened, or the reader paused, while the request was under way.
      } else if (more.ranks !== map.ranks) await loadMap(map.job)
      else if (!hasEnded && to - from > map.n * 1000) await loadMap(map.job) // the job is older than the map is wide
      else if (!hold.isOn) {
        append(map, more)
        map.followed_ms = to
        state.mapVersion.value++
      }
    } catch (error) {
      state.problem.value = error.message
    }
  }
  setTimeout(follow, 1000)
}

/** Starts everything live, once the session is known. */
export async function start() {
  if (state.snapshot) return
  await shown(async () => {
    state.about.value = await get('/api/v1/page/about')
  })
  if (!state.about.value) {
    setTimeout(start, POLL_MS)
    return
  }
  effect(listen)
  follow()
}
