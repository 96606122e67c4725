// The heat map rank x time: pointer and keyboard, zoom, order, and the culprit's flag.
import { computed, signal } from '@preact/signals'
import { useEffect, useRef } from 'preact/hooks'
import { clock, num } from './format.js'
import { cellAt, meanCodes, paint, unframe } from './heat.js'
import { hold } from './live.js'
import { NO_DATA, SCALE, codeMs, colours } from './palette.js'
import { go, job, map, mapVersion, query, snapshot, theme } from './state.js'

const HEIGHT = 340
const FEWEST_ROWS = 4
const FEWEST_COLUMNS = 8
const view = signal(null)
const cursor = signal(null)
const drag = signal(null)
const metric = computed(() => (query.value.get('metric') === 'wait' ? 'wait' : 'late'))
const isSorted = computed(() => query.value.get('order') === 'late')

const whole = m => ({ r0: 0, r1: m.ranks, b0: 0, b1: m.n })
const order = computed(() => {
  const m = map.value
  if (!m) return null
  const ranks = Uint32Array.from({ length: m.ranks }, (_, i) => i)
  if (!isSorted.value) return ranks
  const means = meanCodes(m[metric.value], m.ranks, m.n)
  return ranks.sort((a, b) => means[b] - means[a] || a - b)
})

let shownMap = null
function viewOf(m) {
  if (m !== shownMap) {
    shownMap = m
    view.value = whole(m)
    cursor.value = null
  }
  return view.value
}

if (snapshot?.matrix) {
  const bytes = Uint8Array.from(atob(snapshot.matrix), c => c.charCodeAt(0))
  new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'))).arrayBuffer().then(buffer => {
    map.value = { ...unframe(buffer), job: query.value.get('job') }
  })
}

function draw(canvas, data, part, rows) {
  const box = canvas.getBoundingClientRect()
  const width = Math.max(1, Math.round(box.width * devicePixelRatio))
  const height = Math.max(1, Math.round(box.height * devicePixelRatio))
  if (canvas.width !== width || canvas.height !== height) {
    canvas.width = width
    canvas.height = height
    canvas.image = null
  }
  const context = canvas.getContext('2d', { alpha: false })
  const image = (canvas.image ??= context.createImageData(width, height))
  paint(image, data, part, colours(theme.value), rows)
  context.putImageData(image, 0, 0)
}

function limited(m, next) {
  const r0 = Math.max(0, Math.min(next.r0, m.ranks - FEWEST_ROWS))
  const b0 = Math.max(0, Math.min(next.b0, m.n - FEWEST_COLUMNS))
  return {
    r0,
    b0,
    r1: Math.min(m.ranks, Math.max(r0 + Math.min(FEWEST_ROWS, m.ranks), next.r1)),
    b1: Math.min(m.n, Math.max(b0 + Math.min(FEWEST_COLUMNS, m.n), next.b1)),
  }
}

function zoom(factor, at) {
  const m = map.value
  const v = view.value
  const c = at ?? { r: (v.r0 + v.r1) / 2, b: (v.b0 + v.b1) / 2 }
  const scaled = (from, centre) => Math.round(centre + (from - centre) * factor)
  view.value = limited(m, { r0: scaled(v.r0, c.r), r1: scaled(v.r1, c.r), b0: scaled(v.b0, c.b), b1: scaled(v.b1, c.b) })
}

function open(cell) {
  const m = map.value
  // A job with rare rounds has seconds without a round: they open the round before them.
  const column = m.seq.findLastIndex((seq, at) => seq >= 0 && at <= cell.b)
  const seq = m.seq[column]
  const rank = order.value[cell.r]
  const at = Math.round(m.from_ms + column * m.bucket_ms)
  go(column >= 0 ? { rank, seq, comm: m.comms[m.comm[column]], at } : { rank, seq: null, comm: null, at: null })
}

/** Where the keyboard begins: the culprit, in the newest column with a round. */
function firstCell(m, v) {
  const column = m.seq.findLastIndex((seq, at) => seq >= 0 && at < v.b1)
  const row = order.value.indexOf(job.value?.rank ?? 0)
  return { r: Math.max(v.r0, Math.min(v.r1 - 1, row)), b: Math.max(v.b0, column) }
}

function onKey(event) {
  const m = map.value
  const v = view.value
  const c = cursor.value ?? firstCell(m, v)
  const by = event.shiftKey ? 10 : 1
  const step = { ArrowLeft: [0, -by], ArrowRight: [0, by], ArrowUp: [-by, 0], ArrowDown: [by, 0] }[event.key]
  // The marked cell must not move in time before Enter opens its round.
  if (step || event.key === 'Enter') hold.isOn = true
  if (step) cursor.value = { r: Math.max(v.r0, Math.min(v.r1 - 1, c.r + step[0])), b: Math.max(v.b0, Math.min(v.b1 - 1, c.b + step[1])) }
  else if (event.key === '+' || event.key === '=') zoom(0.5, c)
  else if (event.key === '-') zoom(2, c)
  else if (event.key === '0') view.value = whole(m)
  else if (event.key === 'Escape') {
    view.value = whole(m)
    cursor.value = null
    hold.isOn = false
  }
  else if (event.key === 'Enter' || event.key === ' ') open(c)
  else return
  event.preventDefault()
}

const place = (value, begin, end) => `${(100 * (value - begin)) / (end - begin)}%`

export function HeatMap() {
  const m = map.value
  if (!m) return <section class="card map-card" aria-label="Heat map"><p class="dim" role="status">Loading the heat map</p></section>
  if (!m.ranks || !m.n) return <section class="card" aria-label="Heat map"><p class="dim">{job.value?.n_ranks === 1 ? 'A single process has no rounds to draw. Its time budget is part of the evidence.' : 'No round is stored in this window.'}</p></section>
  return <Map m={m} v={viewOf(m)} rows={order.value} kind={metric.value} />
}

function Map({ m, v, rows, kind }) {
  const canvas = useRef()
  const means = useRef()
  const scale = useRef()
  mapVersion.value
  useEffect(() => {
    const begin = performance.now()
    draw(canvas.current, { codes: m[kind], n: m.n }, v, rows)
    performance.measure('map-draw', { start: begin })
    const codes = Uint8Array.from(meanCodes(m[kind], m.ranks, m.n), Math.round)
    draw(means.current, { codes, n: 1 }, { ...v, b0: 0, b1: 1 }, rows)
    const steps = Uint8Array.from({ length: 140 }, (_, i) => SCALE.first + ((SCALE.last - SCALE.first) * i) / 139)
    draw(scale.current, { codes: steps, n: 140 }, { r0: 0, r1: 1, b0: 0, b1: 140 }, [0])
    canvas.current.dataset.painted = kind
  })
  useEffect(() => {
    const redraw = () => mapVersion.value++
    addEventListener('resize', redraw)
    return () => {
      removeEventListener('resize', redraw)
      hold.isOn = false
    }
  }, [])
  const pointed = event => {
    const box = canvas.current.getBoundingClientRect()
    return cellAt({ codes: m[kind], n: m.n }, v, rows, (event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height, box.width, box.height)
  }
  const onMove = event => {
    hold.isOn = true
    cursor.value = pointed(event)
    if (drag.value) drag.value = { ...drag.value, to: cursor.value }
  }
  const onDown = event => {
    drag.value = { from: pointed(event), to: pointed(event) }
    event.target.setPointerCapture(event.pointerId)
  }
  const onUp = () => {
    const d = drag.value
    drag.value = null
    if (!d) return
    if (Math.abs(d.from.b - d.to.b) < 3 && Math.abs(d.from.r - d.to.r) < 3) open(d.to)
    else view.value = limited(m, { r0: Math.min(d.from.r, d.to.r), r1: Math.max(d.from.r, d.to.r) + 1, b0: Math.min(d.from.b, d.to.b), b1: Math.max(d.from.b, d.to.b) + 1 })
  }
  const leave = () => {
    hold.isOn = false
    if (!drag.value) cursor.value = null
  }
  const c = cursor.value
  const culprit = job.value?.rank
  const culpritRow = culprit == null ? -1 : rows.indexOf(culprit)
  const timeOf = column => m.from_ms + column * m.bucket_ms
  return (
    <section class="card map-card" aria-label="Heat map">
      <div class="tools">
        <h2>{kind === 'late' ? 'Lateness' : 'Longest wait'} by rank and time</h2>
        <button aria-pressed={kind === 'late'} onClick={() => go({ metric: null }, true)}>Late</button>
        <button aria-pressed={kind === 'wait'} onClick={() => go({ metric: 'wait' }, true)}>Wait</button>
        <button aria-pressed={isSorted.value} onClick={() => go({ order: isSorted.value ? null : 'late' }, true)}>Latest first</button>
        <button onClick={() => zoom(0.5)}>Zoom in</button>
        <button onClick={() => zoom(2)}>Zoom out</button>
        <span class="scale">{codeMs(SCALE.first).toFixed(1)} ms<canvas ref={scale} role="img" aria-label="Colour scale, logarithmic" />{num(codeMs(SCALE.last), 0)} ms</span>
      </div>
      <div class="heat">
        <div class="axis y" aria-hidden="true">
          {[0, 0.25, 0.5, 0.75, 1].filter((f, at) => v.r1 - v.r0 >= 5 || at === 0 || at === 4).map(f => {
            const row = Math.min(v.r1 - 1, Math.round(v.r0 + f * (v.r1 - v.r0 - 1)))
            return <span key={f} style={{ top: `${f * 100}%` }}>{rows[row]}</span>
          })}
        </div>
        <div class="frame">
          <canvas
            ref={canvas} class="map" style={{ height: `${HEIGHT}px` }} tabIndex={0} role="application"
            aria-label={`Heat map of ${m.ranks} ranks and ${m.n} time steps. Arrow keys move the marker, plus and minus zoom, zero shows all, Enter opens the round, Escape removes the marker.`}
            onKeyDown={onKey} onPointerDown={onDown} onPointerMove={onMove} onPointerUp={onUp} onPointerLeave={leave} onBlur={leave}
            onDblClick={() => { view.value = whole(m) }}
          />
          {culpritRow >= v.r0 && culpritRow < v.r1 && <div class="flag straggler" aria-hidden="true" style={{ top: place(culpritRow + 0.5, v.r0, v.r1) }}>◀ {culprit}</div>}
          {drag.value && <DragBox d={drag.value} v={v} />}
          {c && <div class="cursor" style={{ left: place(c.b, v.b0, v.b1), top: place(c.r, v.r0, v.r1), width: `max(8px, ${100 / (v.b1 - v.b0)}%)`, height: `max(8px, ${100 / (v.r1 - v.r0)}%)` }} />}
        </div>
        <canvas ref={means} class="means" style={{ height: `${HEIGHT}px` }} role="img" aria-label="Mean of each rank" />
        <span />
        <div class="axis x" aria-hidden="true">
          {[0, 0.25, 0.5, 0.75].map(f => <span key={f} style={{ left: `${f * 100}%` }}>{clock(timeOf(v.b0 + f * (v.b1 - v.b0)))}</span>)}
        </div>
        <span class="dim">mean</span>
      </div>
      <p class="tip" role="status" aria-live="polite">{c ? <Tip m={m} c={c} rows={rows} kind={kind} time={timeOf(c.b)} /> : <span class="dim">Drag to zoom, double click to reset, click a cell for its round. Keyboard: arrows, +, −, 0, Enter.</span>}</p>
    </section>
  )
}

function Tip({ m, c, rows, kind, time }) {
  const code = m[kind][rows[c.r] * m.n + c.b]
  const value = code === NO_DATA ? 'no data' : `${kind === 'late' ? 'late' : 'waited'} ${num(codeMs(code))} ms`
  return (
    <>
      rank <b>{rows[c.r]}</b> at {clock(time)}: <b>{value}</b>
      {m.seq[c.b] >= 0 && <span class="dim"> The latest round of this moment is {m.seq[c.b]}; click to open it.</span>}
    </>
  )
}

function DragBox({ d, v }) {
  const [b0, b1] = [Math.min(d.from.b, d.to.b), Math.max(d.from.b, d.to.b) + 1]
  const [r0, r1] = [Math.min(d.from.r, d.to.r), Math.max(d.from.r, d.to.r) + 1]
  return <div class="box" style={{ left: place(b0, v.b0, v.b1), top: place(r0, v.r0, v.r1), width: `${(100 * (b1 - b0)) / (v.b1 - v.b0)}%`, height: `${(100 * (r1 - r0)) / (v.r1 - v.r0)}%` }} />
}
