// The inference servers: open requests, the oldest first, and the rate and times of each endpoint.
import { signal } from '@preact/signals'
import { useEffect } from 'preact/hooks'
import { post, shown } from './api.js'
import { duration, millis, num, plural } from './format.js'
import { Scroll } from './parts.jsx'
import * as state from './state.js'

const EVERY_MS = 5000
const STUCK_S = 1
const PERCENTILES = ['p50', 'p99', 'p99.9']
const COUNTS = ['Endpoint', 'Requests/s', 'Tokens/s', 'Failed', 'Aborted']
const TIMES = [['First token', 'first_ms'], ['Between tokens', 'between_ms'], ['Whole', 'whole_ms']]
const answer = signal(null)

const load = () => shown(async () => {
  answer.value = await post('/api/v1/inference', {})
})

const Open = ({ rows }) => (
  <Scroll name="Open requests">
    <table>
      <thead><tr><th>Server</th><th>Process</th><th class="num">Open</th><th>Oldest</th><th class="num">Age</th><th>Waits for</th></tr></thead>
      <tbody>
        {rows.map(row => (
          <tr key={`${row.node} ${row.pid}`}>
            <td>{row.model || row.engine} <span class="dim">{row.cluster}</span></td>
            <td>{row.node} {row.pid}</td>
            <td class="num">{row.n_open}{row.n_full > 0 && <span class="dim"> ({row.n_full} not taken by clients)</span>}</td>
            <td>{row.oldest_path}</td>
            <td class="num">{row.oldest_s == null ? '–' : duration(row.oldest_s * 1000)}</td>
            <td class={row.still_s >= STUCK_S ? 'inconclusive' : ''}>{row.oldest_s == null ? 'its client' : `${row.awaits.toLowerCase()}, since ${duration(row.still_s * 1000)}`}</td>
          </tr>
        ))}
      </tbody>
    </table>
  </Scroll>
)

const Endpoints = ({ rows }) => (
  <Scroll name="Endpoints">
    <table class="dense">
      <thead>
        <tr>
          {COUNTS.map(title => <th key={title} rowSpan={2} class={title === 'Endpoint' ? '' : 'num'}>{title}</th>)}
          {TIMES.map(([title]) => <th key={title} colSpan={PERCENTILES.length} scope="colgroup" class="num">{title}</th>)}
        </tr>
        <tr>{TIMES.flatMap(([title]) => PERCENTILES.map(p => <th key={`${title} ${p}`} class="num">{p}</th>))}</tr>
      </thead>
      <tbody>
        {rows.map(row => (
          <tr key={[row.cluster, row.engine, row.model, row.path].join(' ')}>
            <td class="name">{row.model || row.engine} {row.path} <span class="dim">{row.cluster}</span></td>
            <td class="num">{num(row.per_second)}</td>
            <td class="num">{num(row.tokens_per_second)}</td>
            <td class="num">{row.n_failed}</td>
            <td class="num">{row.n_aborted}</td>
            {TIMES.flatMap(([, name]) => PERCENTILES.map(p => <td key={`${name} ${p}`} class="num">{millis(row[name][p])}</td>))}
          </tr>
        ))}
      </tbody>
    </table>
  </Scroll>
)

export function Servers() {
  useEffect(() => {
    load()
    const timer = setInterval(() => { if (!state.isPaused.value && !document.hidden) load() }, EVERY_MS)
    return () => clearInterval(timer)
  }, [])
  const { rows, open_requests: open } = answer.value ?? {}
  return (
    <main>
      <h1>Inference servers</h1>
      {!rows && <p class="dim" role="status">Loading</p>}
      {rows && !rows.length && !open.length && <p class="dim">No request to an inference server in the last five minutes.</p>}
      {open?.length > 0 && <><h2>{plural(open.reduce((n, row) => n + row.n_open, 0), 'open request')}</h2><Open rows={open} /></>}
      {rows?.length > 0 && <><h2>Last five minutes</h2><Endpoints rows={rows} /></>}
    </main>
  )
}
