// One job: verdict and evidence, heat map, a round, a timeline, incidents, the time budget.
import { useEffect } from 'preact/hooks'
import { Alerts } from './alerts.jsx'
import { get, page, shown } from './api.js'
import { Flame } from './flame.jsx'
import { clock, duration, gpuTime, millis, num, percent, plain, plural, range, when } from './format.js'
import { HeatMap } from './heatmap.jsx'
import { loadMap } from './live.js'
import { Budget, Ledger, Reasons, Scroll, State, nameOf } from './parts.jsx'
import { Round, loadRound } from './round.jsx'
import { evidence, health, inPage, job, jobKey, linkTo, map, overview, query, round, snapshot, user } from './state.js'
import { Timeline } from './timeline.jsx'

const REFRESH_MS = 10_000
const windowOf = () => {
  const [from, to] = ['from', 'to'].map(name => query.value.get(name))
  return to ? { from: from ?? +to - 600_000, to } : {}
}

async function loadOverview(key) {
  const answer = await get(page('job', { job: key }))
  if (key === jobKey.value) overview.value = { ...answer, key }
}

async function loadEvidence(key, rank) {
  const answer = await get(page('evidence', { job: key, rank, ...windowOf() }))
  if (key === jobKey.value) evidence.value = answer
}

const chosenRank = () => query.value.get('rank') ?? job.value?.rank ?? 0

function useJobData() {
  const key = jobKey.value
  const [from, to, seq, comm, at] = ['from', 'to', 'seq', 'comm', 'at'].map(name => query.value.get(name))
  const row = job.value ?? (overview.value?.key === key ? overview.value.job : null)
  const verdictId = row?.verdict_id
  useEffect(() => {
    if (snapshot) return
    map.value = overview.value = evidence.value = round.value = null
    shown(() => loadOverview(key))
  }, [key])
  useEffect(() => {
    if (snapshot || !row) return
    shown(() => loadMap(key, from, to))
  }, [key, from, to, !row])
  useEffect(() => {
    if (snapshot) return
    if (overview.value?.key === key) shown(() => loadOverview(key))
  }, [verdictId, row?.summary])
  const rank = chosenRank()
  useEffect(() => {
    if (snapshot || !row) return
    const load = () => document.hidden || shown(() => loadEvidence(key, rank))
    load()
    if (to) return
    const timer = setInterval(load, REFRESH_MS)
    return () => clearInterval(timer)
  }, [key, rank, verdictId, !row, to])
  useEffect(() => {
    if (snapshot) return
    if (seq && comm) shown(() => loadRound(key, comm, seq, at))
    else round.value = null
  }, [key, seq, comm])
}

export function Job() {
  useJobData()
  const row = job.value ?? overview.value?.job
  return (
    <main>
      <div class="tools">
        {!snapshot && <a href={linkTo({})} onClick={inPage({})}>All jobs</a>}
        <h1>{row?.cluster ?? jobKey.value}</h1>
        {row && (
          <span class="dim">
            {row.n_ranks === 1 ? 'one process' : `${row.n_ranks ? plural(row.n_ranks, 'rank') : 'ranks'} on ${plural(row.n_nodes ?? 0, 'machine')}`}
            {row.rounds_per_s ? `, ${num(row.rounds_per_s)} rounds/s` : ''}, job {row.id}
            {row.ended_ms ? `, ended ${when(row.ended_ms)}` : ''}
          </span>
        )}
      </div>
      <Owner of={row?.owner} />
      {overview.value?.caveat && <p class="inconclusive">{overview.value.caveat}</p>}
      {row ? <div class="two"><div class="column"><Verdict row={row} /><JobBudget row={row} /></div><Evidence row={row} /></div> : <NoJob />}
      <HeatMap />
      <Round />
      <Timeline />
      {evidence.value && <Flame stacks={evidence.value.stacks} rank={evidence.value.rank} />}
      <Incidents />
    </main>
  )
}

const Owner = ({ of }) => of && Object.keys(of).length > 0 && <p class="dim">Owner: {Object.entries(of).map(([label, value]) => `${label.replaceAll('_', ' ')} ${value}`).join(', ')}.</p>

function NoJob() {
  if (!overview.value) return <section class="card" aria-label="Verdict"><p class="dim" role="status">Loading the job</p></section>
  return (
    <section class="card" aria-label="Verdict">
      <p>This job has sent no data in the last minutes, and it has no open verdict.</p>
      <p class="dim">Its earlier incidents are below. Use the SQL button to query its stored rows.</p>
    </section>
  )
}

const Fact = ({ name, children }) => (
  <div>
    <dt>{name}</dt>
    <dd>{children}</dd>
  </div>
)

function howOften(verdict) {
  const facts = verdict?.evidence ?? {}
  if (verdict?.period_steps > 1) return `every ${verdict.period_steps} steps`
  if (facts.n_late_steps && facts.n_steps) return `${num(facts.n_late_steps, 0)} of ${num(facts.n_steps, 0)} steps`
  return verdict?.n_late_rounds ? plural(verdict.n_late_rounds, 'round') : '–'
}

function Verdict({ row }) {
  const verdict = overview.value?.verdict?.verdict_id === row.verdict_id ? overview.value.verdict : null
  if (!row.verdict_id) return <WithoutVerdict row={row} />
  const location = verdict?.causes?.map(cause => cause.evidence?.at ?? cause.evidence?.code).find(Boolean)
  return (
    <section class="card" aria-label="Verdict">
      <h2 class="big">
        <State of={row.state} /> {row.rank != null && <>rank {row.rank}{row.n_ranks_named > 1 && ` and ${row.n_ranks_named - 1} more`}</>}
      </h2>
      <p class="summary">{row.summary}</p>
      <dl class="facts">
        {row.late_ms != null && <Fact name="late (median)">{millis(row.late_ms)}</Fact>}
        {howOften(verdict) !== '–' && <Fact name="how often">{howOften(verdict)}</Fact>}
        {row.ended_ms ? <Fact name="lost">{gpuTime(row.gpu_seconds_lost)}</Fact> : <Fact name="GPUs lost now">{range(row.gpus_lost)}</Fact>}
        {row.ended_ms ? row.usd_lost && <Fact name="dollars">{range(row.usd_lost, '$')}</Fact> : row.usd_per_hour && <Fact name="dollars an hour">{range(row.usd_per_hour, '$')}</Fact>}
        <Fact name="waiting ranks">{verdict ? num(verdict.n_victims, 0) : '–'}</Fact>
        <Fact name="confidence">{verdict ? percent(verdict.confidence) : '–'}</Fact>
      </dl>
      <p class="dim">Since {when(row.since_ms)}.{!row.ended_ms && ` Last confirmed ${when(row.confirmed_ms)}.`}</p>
      {row.others.map(other => <p key={other} class="dim">Also open: {other}</p>)}
      <Reasons of={row.reasons} />
      {verdict?.n_rows_not_examined > 0 && <p class="inconclusive">{plural(verdict.n_rows_not_examined, 'row')} arrived too fast and were not examined.</p>}
      <Causes causes={verdict?.causes} />
      {location && <p>Code location: <code>{plain(location)}</code></p>}
      {verdict?.advice?.length > 0 && !row.reasons.length && <div><h3>Action</h3><ul>{verdict.advice.map(line => <li key={line}>{line}</li>)}</ul></div>}
      {!snapshot && !user.value?.job && !health.value?.trace && <Alerts row={row} verdict={verdict} />}
    </section>
  )
}

function WithoutVerdict({ row }) {
  const isProcess = row.n_ranks === 1
  const text = {
    healthy: isProcess ? 'No fault slows down this process.' : 'No rank slows down this job.',
    recovered: 'No fault slows down this job now. The incidents below have ended.',
    ended: 'The job has ended and has no open verdict.',
    quiet: 'The job sends no data and has no open verdict.',
    unknown: 'The data does not show whether this job is healthy.',
  }
  return (
    <section class="card" aria-label="Verdict">
      <h2 class="big"><State of={row.state} /></h2>
      <p class="summary">{text[row.state]}</p>
      <Reasons of={row.reasons} />
      <p class="dim">{isProcess ? 'Latest data' : 'Last round'} {when(row.last_ms)}.</p>
    </section>
  )
}

function Causes({ causes }) {
  if (!causes?.length) return null
  return (
    <div>
      <h3>Cause</h3>
      {causes.map(cause => typeof cause === 'string' ? <p key={cause}>{cause}</p> : (
        <p key={cause.cause}>
          <b>{cause.label ?? cause.cause}</b>: {percent(cause.share)} of the excess time
          {Object.keys(cause.evidence ?? {}).length > 0 && <span class="dim"> ({plain(cause.evidence)})</span>}
        </p>
      ))}
    </div>
  )
}

function Evidence({ row }) {
  const facts = evidence.value
  if (!facts) return <section class="card" aria-label="Evidence"><p class="dim" role="status">Loading the evidence</p></section>
  const step = facts.late_step
  const hasNothing = row.n_ranks !== 1 && !facts.ledger.length && !step && !facts.off_cpu.length
  return (
    <section class="card" aria-label="Evidence">
      {step && <Ledger rows={step.rows} rank={facts.rank} title="Time ledger of the newest late step" note={`${num(step.late_ms)} ms late at ${when(step.time_ms)}, from round ${step.from_seq} to ${step.to_seq}`} />}
      {facts.ledger.length > 0 && <Ledger rows={facts.ledger} rank={facts.rank} title="Time ledger of a round (mean)" note={`${num(facts.n_rounds, 0)} rounds since ${when(facts.ledger_from_ms)}`} />}
      {hasNothing && <p class="dim">No time ledger was recorded for rank {facts.rank}{row.state === 'hang' ? ' in the stored rows' : ''}.</p>}
      <Longest rows={facts.off_cpu} title="Longest intervals off the CPU" />
      <Longest rows={facts.slow_calls} title="Longest calls" />
      <Gpu rows={facts.gpu} />
    </section>
  )
}

function JobBudget({ row }) {
  const facts = evidence.value
  return (
    <section class="card" aria-label="Time budget">
      <h2>Time budget of {row.n_ranks === 1 ? 'the process' : 'all ranks'}</h2>
      {facts ? <Budget rows={facts.budget} /> : <p class="dim">Loading the time budget</p>}
      {facts?.ledger_from_ms && <p class="dim">Since {when(facts.ledger_from_ms)}.</p>}
    </section>
  )
}

function Longest({ rows, title }) {
  if (!rows?.length) return null
  return (
    <div>
      <h3>{title}</h3>
      <ol class="longest">
        {rows.slice(0, 3).map((row, at) => (
          <li key={at}>
            <b class="num">{millis(row.ms)}</b>
            <span>
              {nameOf(row.name)} <span class="dim" title={when(row.time_ms)}>at {clock(row.time_ms)}{row.taken_by && `; CPU taken by ${row.taken_by}`}</span>
              {row.stack.length > 0 && <><br /><code>{row.stack.slice(0, 2).join(' < ')}</code></>}
            </span>
          </li>
        ))}
      </ol>
    </div>
  )
}

function Gpu({ rows }) {
  if (!rows?.length) return null
  return (
    <div>
      <h3>GPU metrics of the machine</h3>
      <ul class="legend">{rows.slice(0, 8).map(row => <li key={row.gpu + row.name}>{row.name} {num(row.value)} {row.unit}</li>)}</ul>
    </div>
  )
}

function Incidents() {
  const all = overview.value?.incidents ?? []
  if (!all.length) return null
  const first = Math.min(...all.map(row => Date.parse(row.since)).filter(Boolean))
  return (
    <section class="card" aria-label="Incidents">
      <h2>Incidents of this job</h2>
      <p class="dim">{plural(overview.value.n_incidents, 'incident')}{first < Infinity && ` since ${when(first)}`}{overview.value.n_incidents > all.length && `; the newest ${all.length} are listed`}.</p>
      <Scroll name="Table of incidents">
        <table class="dense">
          <caption class="hidden">Incidents, newest first</caption>
          <thead><tr><th scope="col">Kind</th><th scope="col">State</th><th scope="col">Rank</th><th scope="col" class="opt">Summary</th><th scope="col">Since</th><th scope="col" class="num opt">Lasted</th><th scope="col" class="num">GPU seconds</th></tr></thead>
          <tbody>
            {all.map(row => {
              const [since, until] = [row.since, row.until].map(text => Date.parse(text))
              const link = { job: jobKey.value, from: since - 60_000, to: Math.min((until || since) + 60_000, since + 1_140_000), ...(row.rank != null && { rank: row.rank }) }
              return (
                <tr key={row.verdict_id}>
                  <td><State of={row.kind} /></td>
                  <td>{row.state}</td>
                  <td>{row.rank ?? ''}</td>
                  <td class="opt">{row.summary}</td>
                  <td>{since && !snapshot ? <a href={linkTo(link)} onClick={inPage(link)}>{when(since)}</a> : when(since)}</td>
                  <td class="num opt">{until ? duration(until - since) : '–'}</td>
                  <td class="num">{num(row.gpu_seconds)}</td>
                </tr>
              )
            })}
          </tbody>
        </table>
      </Scroll>
    </section>
  )
}

