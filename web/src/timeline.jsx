// The timeline of a short window: arrivals, waits, off-CPU intervals and calls of the culprit and some peers.
import { signal } from '@preact/signals'
import { useEffect } from 'preact/hooks'
import { get, page, shown } from './api.js'
import { clock, num } from './format.js'
import { Scroll } from './parts.jsx'
import { evidence, job, jobKey, query, round, snapshot } from './state.js'

const LANE = 46
const LEFT = 80
const WIDTH = 910
const TOP = { wait: 14, offcpu: 14, call: 30, arrival: 4 }
const HEIGHT = { wait: 13, offcpu: 13, call: 9, arrival: 34 }
const timeline = signal(null)
const spanMs = signal(1000)

/** The middle of the window: the open round, otherwise the newest late step. */
function middleMs() {
  if (round.value) return Number(BigInt(round.value.t0_ns) / 1_000_000n)
  return evidence.value?.late_step?.time_ms ?? null
}

function ranksOf(row) {
  const first = Number(query.value.get('rank') ?? row.rank ?? 0)
  const n = row.n_ranks ?? 1
  return [...new Set([first, 0, Math.floor(n / 2), n - 1])].slice(0, 4)
}

async function load(key, row, middle) {
  const [from, to] = [middle - spanMs.value / 2, middle + spanMs.value / 2].map(Math.round)
  const answer = await get(page('timeline', { job: key, ranks: ranksOf(row).join(','), from, to }))
  if (key === jobKey.value) timeline.value = { ...answer, key }
}

export function Timeline() {
  const row = job.value
  const middle = middleMs()
  const key = jobKey.value
  useEffect(() => {
    if (!snapshot && row && middle) shown(() => load(key, row, middle))
  }, [key, middle, spanMs.value, query.value.get('rank')])
  const t = timeline.value
  if (snapshot || !t || t.key !== key) return null
  const total = (t.to_ms - t.from_ms) * 1000
  const x = us => LEFT + (WIDTH * Math.max(0, Math.min(total, us))) / total
  const lane = rank => t.ranks.indexOf(rank)
  const drawn = t.events.filter(event => lane(event.rank) >= 0)
  const ticks = [0, 0.25, 0.5, 0.75, 1]
  const setSpan = factor => {
    spanMs.value = Math.max(50, Math.min(30_000, spanMs.value * factor))
  }
  return (
    <section class="card" aria-label="Timeline">
      <div class="tools">
        <h2>Timeline around {clock(middle ?? t.from_ms)}</h2>
        <button onClick={() => setSpan(0.5)}>Shorter</button>
        <button onClick={() => setSpan(2)}>Longer</button>
        <span class="dim">{num(t.to_ms - t.from_ms, 0)} ms</span>
        <a href={page('perfetto', { job: key, from: t.from_ms, to: t.to_ms })} download="stallscope.pftrace">Save this window for Perfetto</a>
      </div>
      <Scroll name="Drawing of the timeline">
        <svg class="wide" viewBox={`0 0 1000 ${t.ranks.length * LANE + 20}`} role="img" aria-label={`Timeline of ranks ${t.ranks.join(', ')}: ${drawn.length} arrivals, waits, off-CPU intervals and calls`}>
          {t.ranks.map((rank, at) => (
            <g key={rank}>
              <text x="0" y={at * LANE + 25}>rank {rank}</text>
              <line x1={LEFT} x2={LEFT + WIDTH} y1={at * LANE + 44} y2={at * LANE + 44} />
            </g>
          ))}
          {drawn.map((event, at) => {
            const begin = x(event.at_us)
            const width = event.kind === 'arrival' ? 2 : Math.max(1, x(event.at_us + event.us) - begin)
            return (
              <rect key={at} class={event.kind === 'offcpu' ? `c-${event.name}` : event.kind} x={begin} width={width} y={lane(event.rank) * LANE + TOP[event.kind]} height={HEIGHT[event.kind]}>
                <title>{`${event.kind === 'offcpu' ? 'off the CPU: ' : ''}${event.name}${event.us ? `, ${num(event.us / 1000, 2)} ms` : ''}`}</title>
              </rect>
            )
          })}
          {ticks.map(f => <text key={f} class="dim" x={LEFT + f * WIDTH * 0.93} y={t.ranks.length * LANE + 15}>{num((f * total) / 1000, 0)} ms</text>)}
        </svg>
      </Scroll>
      <ul class="legend"><li><i class="k-arrival" />arrival at a collective</li><li><i class="k-wait" />wait for a collective</li><li><i class="k-call" />slow call</li><li>other colours: off the CPU, by category</li></ul>
    </section>
  )
}
