// Events and SQL: the hub's own SQL tool, with examples, the columns of each table, and downloads.
import { signal } from '@preact/signals'
import { useEffect } from 'preact/hooks'
import { post, request, save, shown } from './api.js'
import { num, plural } from './format.js'
import { about, go, inPage, query, user } from './state.js'

const EXAMPLES = {
  'Open verdicts': "SELECT cluster_id, kind, rank, late_ms, cause, summary\nFROM verdicts WHERE state = 'open'",
  'Latest ranks of 5 minutes': "SELECT cluster_id, rank, count(*) AS rounds, max(late_ns) / 1e6 AS max_late_ms\nFROM collectives\nWHERE ts > now() - INTERVAL 5 MINUTE\nGROUP BY ALL ORDER BY max_late_ms DESC NULLS LAST LIMIT 20",
  'Longest calls': 'SELECT ts, node_id, pid, symbol, duration_ns / 1e6 AS ms\nFROM calls ORDER BY duration_ns DESC LIMIT 20',
  'GPU hours lost by cause': 'SELECT cause, count(*) AS verdicts, sum(gpu_seconds) / 3600 AS gpu_hours\nFROM verdicts GROUP BY ALL ORDER BY gpu_hours DESC',
  'Rows by machine': 'SELECT node_id, count(*) AS collectives, max(ts) AS latest\nFROM collectives GROUP BY ALL ORDER BY node_id',
}
const ROWS = [100, 1000, 10_000]
const MAX_SHOWN = 500
const text = signal(null)
const result = signal(null)
const isRunning = signal(false)
const limit = signal(ROWS[0])
const columns = signal({})

async function run() {
  if (isRunning.value || !text.value?.trim()) return
  isRunning.value = true
  const begin = performance.now()
  go({ sql: text.value }, true)
  const answer = await shown(() => post('/api/v1/sql', { sql: text.value, limit: limit.value }))
  if (answer) result.value = { ...answer, ms: performance.now() - begin }
  isRunning.value = false
}

async function describe(table, isOpen) {
  if (!isOpen || columns.value[table]) return
  const answer = await shown(() => post('/api/v1/sql', { sql: `SELECT * FROM ${table} LIMIT 0` }))
  if (answer) columns.value = { ...columns.value, [table]: answer.columns }
}

const quoted = value => {
  const cell = value == null ? '' : typeof value === 'object' ? JSON.stringify(value) : String(value)
  // A spreadsheet runs a cell that begins like a formula.
  const safe = /^[=+\-@\t\r]/.test(cell) && Number.isNaN(Number(cell)) ? `'${cell}` : cell
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe
}

const asCsv = ({ columns: names, rows }) => [names, ...rows].map(row => row.map(quoted).join(',')).join('\r\n') + '\r\n'

const saveCsv = () => save(new Response(asCsv(result.value), { headers: { 'content-type': 'text/csv' } }), 'stallscope.csv')
const saveParquet = () =>
  shown(async () => save(await request('/api/v1/page/parquet', { columns: result.value.columns, rows: result.value.rows }), 'stallscope.parquet'))

export function Sql() {
  const linked = query.value.get('sql')
  useEffect(() => {
    if (linked && linked !== text.value) {
      text.value = linked
      run()
    } else text.value ??= EXAMPLES['Open verdicts']
  }, [linked])
  const onKey = event => {
    if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) {
      event.preventDefault()
      run()
    }
  }
  const mayRun = user.value?.scopes.includes('sql')
  return (
    <main>
      <div class="tools"><a href="?" onClick={inPage({})}>All jobs</a><h1>Events and SQL</h1></div>
      {!mayRun && <p class="inconclusive">This session cannot run SQL. Sign in with a token that has the scope <code>sql</code>.</p>}
      <div class="sql">
        <section class="card" aria-label="Tables">
          <h2>Tables</h2>
          {about.value.tables.map(table => (
            <details key={table} onToggle={event => describe(table, event.target.open)}>
              <summary>{table}</summary>
              <ul class="columns">{(columns.value[table] ?? []).map(name => <li key={name}><code>{name}</code></li>)}</ul>
            </details>
          ))}
        </section>
        <section class="card" aria-label="Statement">
          <label for="statement">One SELECT in DuckDB's SQL. Times are <code>ts</code> (UTC) and <code>ts_ns</code>.</label>
          <textarea id="statement" rows="7" spellcheck={false} value={text.value ?? ''} onInput={event => { text.value = event.target.value }} onKeyDown={onKey} />
          <div class="tools">
            <button onClick={run} disabled={isRunning.value || !mayRun}>Run (Ctrl+Enter)</button>
            <label>Maximum rows <select value={limit.value} onChange={event => { limit.value = +event.target.value }}>{ROWS.map(n => <option key={n} value={n}>{num(n, 0)}</option>)}</select></label>
            <label>Example <select value="" onChange={event => { text.value = EXAMPLES[event.target.value] ?? text.value; event.target.value = '' }}>
              <option value="">choose</option>
              {Object.keys(EXAMPLES).map(name => <option key={name}>{name}</option>)}
            </select></label>
            {result.value && <><button onClick={saveCsv}>Save CSV</button><button onClick={saveParquet}>Save Parquet</button></>}
          </div>
          <p role="status" class="dim">{isRunning.value ? 'Running' : result.value ? summary(result.value) : 'The hub limits time, memory and rows of a statement.'}</p>
          {result.value && <Rows result={result.value} />}
        </section>
      </div>
    </main>
  )
}

function summary(answer) {
  const parts = [`${plural(answer.rows.length, 'row')} in ${num(answer.ms, 0)} ms`]
  if (answer.rows.length > MAX_SHOWN) parts.push(`the first ${MAX_SHOWN} are listed; saved files contain all rows`)
  if (answer.truncated) parts.push('more rows exist')
  if (answer.note) parts.push(answer.note)
  return `${parts.join('; ')}.`
}

function Rows({ result: { columns: names, rows } }) {
  return (
    <div class="scroll rows" tabIndex={0} role="region" aria-label="Rows of the answer">
      <table class="dense">
        <caption class="hidden">Rows of the answer</caption>
        <thead><tr>{names.map((name, at) => <th key={at} scope="col">{name}</th>)}</tr></thead>
        <tbody>
          {rows.slice(0, MAX_SHOWN).map((row, at) => (
            <tr key={at}>{row.map((value, i) => <td key={i} class={typeof value === 'number' ? 'num' : ''}>{value == null ? <span class="dim">NULL</span> : typeof value === 'object' ? JSON.stringify(value) : String(value)}</td>)}</tr>
          ))}
        </tbody>
      </table>
    </div>
  )
}
