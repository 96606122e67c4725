// Compare two jobs, or two windows of one job: before and after a fix.
import { signal } from '@preact/signals'
import { useEffect } from 'preact/hooks'
import { get, page, request, shown } from './api.js'
import { clock, num, percent, plural } from './format.js'
import { meanCodes, unframe } from './heat.js'
import { NO_DATA, codeMs } from './palette.js'
import { Budget, Scroll } from './parts.jsx'
import { go, inPage, query, rows } from './state.js'

const MINUTE = 60_000
const SPAN_MS = 5 * MINUTE
const MAX_RANKS = 12
const sides = signal({ a: null, b: null })

/** The job and the window of a side: by default the last five minutes, and the five minutes before them. */
function selection(side) {
  const q = query.value
  const key = q.get(side) ?? rows.value?.[0]?.job
  const now = Math.floor(Date.now() / MINUTE) * MINUTE
  const to = Number(q.get(`${side}_to`)) || (side === 'a' ? now - SPAN_MS : now)
  const from = Number(q.get(`${side}_from`)) || to - SPAN_MS
  return { key, from, to }
}

async function load(side, { key, from, to }) {
  const n = Math.max(1, Math.min(600, Math.round((to - from) / 1000)))
  const answer = await request(page('matrix', { job: key, from, to, n }))
  const map = unframe(await answer.arrayBuffer())
  const row = rows.value?.find(each => each.job === key)
  const facts = await get(page('evidence', { job: key, rank: row?.rank ?? 0, from, to }))
  const seconds = Array.from({ length: map.n }, (_, column) => worstOf(map, column)).filter(code => code !== NO_DATA)
  sides.value = {
    ...sides.value,
    [side]: { key, from, to, map, facts, row, means: meanCodes(map.late, map.ranks, map.n), worst: seconds },
  }
}

function worstOf(map, column) {
  let most = -1
  for (let rank = 0; rank < map.ranks; rank++) {
    const code = map.late[rank * map.n + column]
    if (code !== NO_DATA && code > most) most = code
  }
  return most < 0 ? NO_DATA : most
}

const median = values => (values.length ? [...values].sort((a, b) => a - b)[values.length >> 1] : NO_DATA)

export function Compare() {
  const [a, b] = ['a', 'b'].map(selection)
  useEffect(() => { if (a.key) shown(() => load('a', a)) }, [a.key, a.from, a.to])
  useEffect(() => { if (b.key) shown(() => load('b', b)) }, [b.key, b.from, b.to])
  if (!rows.value?.length) return <main><h1>Compare</h1><p class="dim">No job has sent data yet.</p></main>
  return (
    <main>
      <div class="tools"><a href="?" onClick={inPage({})}>All jobs</a><h1>Compare two windows</h1></div>
      <div class="two"><Side name="a" title="Before" chosen={a} /><Side name="b" title="After" chosen={b} /></div>
      {sides.value.a && sides.value.b && <Difference a={sides.value.a} b={sides.value.b} />}
    </main>
  )
}

const localText = ms => {
  const date = new Date(ms - new Date(ms).getTimezoneOffset() * MINUTE)
  return date.toISOString().slice(0, 16)
}

function Side({ name, title, chosen }) {
  const side = sides.value[name]
  const set = changes => go(Object.fromEntries(Object.entries(changes).map(([key, value]) => [key ? `${name}_${key}` : name, value])), true)
  const setTime = key => event => {
    const ms = new Date(event.target.value).getTime()
    if (!Number.isNaN(ms)) set(key === 'from' ? { from: ms, to: Math.max(chosen.to, ms + MINUTE) } : { from: Math.min(chosen.from, ms - MINUTE), to: ms })
  }
  return (
    <section class="card" aria-label={title}>
      <h2>{title}</h2>
      <div class="tools">
        <label>Job <select value={chosen.key} onChange={event => set({ '': event.target.value })}>{rows.value.map(row => <option key={row.job} value={row.job}>{row.cluster} {row.id.slice(0, 12)}</option>)}</select></label>
        <label>From <input type="datetime-local" value={localText(chosen.from)} onChange={setTime('from')} /></label>
        <label>To <input type="datetime-local" value={localText(chosen.to)} onChange={setTime('to')} /></label>
      </div>
      {side && <Budget rows={side.facts.budget} />}
      {side && <p class="dim">{clock(side.from)} to {clock(side.to)}, {plural(side.map.ranks, 'rank')}.</p>}
    </section>
  )
}

const worstText = side => {
  const code = median(side.worst)
  return code === NO_DATA ? '–' : `${num(codeMs(code))} ms`
}

/** GPUs that wait for collectives: the share of this category in the time budget, times the ranks. */
function waitingGpus(side) {
  if (!side.facts.budget.length) return null
  return (side.facts.budget.find(row => row.category === 'wait_gpu')?.share ?? 0) * side.map.ranks
}

/** The price of a GPU hour, from the cost of a verdict; null where no verdict has a price. */
function price() {
  const row = rows.value.find(each => each.usd_per_hour?.[1] && each.gpus_lost?.[1])
  return row ? row.usd_per_hour[1] / row.gpus_lost[1] : null
}

function cost(side) {
  const gpus = waitingGpus(side)
  const usd = price()
  return gpus == null ? '–' : `${num(gpus)} GPUs${usd == null ? '' : `, $${num(gpus * usd)} an hour`}`
}

function Difference({ a, b }) {
  const n = Math.max(a.map.ranks, b.map.ranks)
  const ranks = Array.from({ length: n }, (_, rank) => rank)
  const change = rank => Math.abs((a.means[rank] ?? 0) - (b.means[rank] ?? 0))
  const latest = rank => Math.max(a.means[rank] ?? 0, b.means[rank] ?? 0)
  const listed = ranks.sort((x, y) => change(y) - change(x) || latest(y) - latest(x) || x - y).slice(0, MAX_RANKS)
  const categories = [...new Set([...a.facts.budget, ...b.facts.budget].map(row => row.category))]
  const share = (side, category) => side.facts.budget.find(row => row.category === category)?.share ?? 0
  const label = category => [...a.facts.budget, ...b.facts.budget].find(row => row.category === category).label
  return (
    <section class="card" aria-label="Difference">
      <h2>Difference</h2>
      <dl class="facts">
        <div><dt>worst lateness per second (median)</dt><dd>{worstText(a)} → {worstText(b)}</dd></div>
        <div><dt>waiting for collectives</dt><dd>{cost(a)} → {cost(b)}</dd></div>
      </dl>
      <div class="two">
        <Scroll name="Time budget">
          <h3>Time budget</h3>
          <table class="dense">
            <caption class="hidden">Time budget before and after</caption>
            <thead><tr><th scope="col">Category</th><th scope="col" class="num">Before</th><th scope="col" class="num">After</th><th scope="col" class="num">Change</th></tr></thead>
            <tbody>{categories.slice(0, 8).map(category => <tr key={category}><td>{label(category)}</td><td class="num">{percent(share(a, category))}</td><td class="num">{percent(share(b, category))}</td><td class="num">{num((share(b, category) - share(a, category)) * 100)} points</td></tr>)}</tbody>
          </table>
        </Scroll>
        <Scroll name="Lateness by rank">
          <h3>Lateness by rank (typical), largest change first</h3>
          <table class="dense">
            <caption class="hidden">Lateness by rank before and after</caption>
            <thead><tr><th scope="col">Rank</th><th scope="col" class="num">Before</th><th scope="col" class="num">After</th></tr></thead>
            <tbody>{listed.map(rank => <tr key={rank}><td>{rank}</td><td class="num">{num(codeMs(a.means[rank] ?? 0))} ms</td><td class="num">{num(codeMs(b.means[rank] ?? 0))} ms</td></tr>)}</tbody>
          </table>
          {n > MAX_RANKS && <p class="dim">{plural(n - MAX_RANKS, 'rank')} with smaller changes are not listed.</p>}
        </Scroll>
      </div>
    </section>
  )
}
