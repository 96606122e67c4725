// All jobs, the worst first; recent incidents; the hub's own health.
import { duration, gpuTime, millis, num, plural, range, when } from './format.js'
import { Moment, Scroll, State, Strip } from './parts.jsx'
import { health, inPage, incidents, linkTo, rows } from './state.js'

const isFault = row => row.verdict_id && row.state !== 'inconclusive'
const lost = row => row.gpus_lost?.[1] ?? 0

const byUrgency = (a, b) =>
  a.urgency - b.urgency || lost(b) - lost(a) || (b.late_ms ?? 0) - (a.late_ms ?? 0) || (a.job < b.job ? -1 : 1)

function headline(all) {
  const nFaulty = all.filter(isFault).length
  const nUnknown = all.filter(row => row.state === 'unknown' || row.state === 'inconclusive').length
  const rest = nUnknown ? `; no answer yet for ${plural(nUnknown, 'job')}` : ''
  if (nFaulty) return `${nFaulty} of ${plural(all.length, 'job')} ${nFaulty === 1 ? 'is' : 'are'} slowed down or stopped${rest}`
  if (nUnknown || all.some(row => row.state === 'quiet')) return `No fault in ${plural(all.length, 'job')}${rest}`
  const running = all.filter(row => !row.ended_ms)
  if (!running.length) return all.length === 1 ? 'The job has ended without an open fault' : `All ${all.length} jobs have ended without an open fault`
  return running.length === 1 ? 'The job is healthy' : `All ${running.length} running jobs are healthy`
}

export function Jobs() {
  if (rows.value === null) return <main><h1 class="big">All jobs</h1><p class="dim" role="status">Loading the jobs</p></main>
  const all = [...rows.value].sort(byUrgency)
  return (
    <main>
      <h1 class="big" role="status">{all.length ? headline(all) : 'No job has sent data yet'}</h1>
      {all.length ? <JobTable all={all} /> : <FirstAgent />}
      <RecentIncidents />
      <Health />
    </main>
  )
}

const OWNERS = ['user', 'account', 'namespace', 'job_name', 'workload']
const ownerOf = row => [...new Set(OWNERS.map(label => row.owner?.[label]).filter(Boolean))].join(', ')

function JobTable({ all }) {
  const hasOwners = all.some(ownerOf)
  const isOver = all.every(row => row.ended_ms)
  const hasPrices = all.some(row => row.usd_lost)
  return (
    <Scroll name="Table of jobs">
      <table>
        <caption class="hidden">Jobs, worst first</caption>
        <thead>
          <tr>
            <th scope="col">State</th>
            <th scope="col">Job</th>
            {hasOwners && <th scope="col" class="opt">Owner</th>}
            <th scope="col" class="num">Ranks</th>
            <th scope="col">Culprit</th>
            <th scope="col" class="opt">Cause</th>
            <th scope="col" class="opt">Lateness, 10 min</th>
            <th scope="col" class="num">Late</th>
            <th scope="col" class="num opt">{isOver ? 'Lost' : 'GPUs lost now'}</th>
            {hasPrices && <th scope="col" class="num opt">{isOver ? '$' : '$ an hour'}</th>}
            <th scope="col" class="opt">Since</th>
          </tr>
        </thead>
        <tbody>{all.map(row => <JobRow key={row.job} row={row} hasOwners={hasOwners} hasPrices={hasPrices} />)}</tbody>
      </table>
    </Scroll>
  )
}

const culprit = row =>
  row.rank == null ? '' : `rank ${row.rank}${row.n_ranks_named > 1 ? ` and ${row.n_ranks_named - 1} more` : ''}`

function JobRow({ row, hasOwners, hasPrices }) {
  const link = { job: row.job }
  return (
    <tr class="row">
      <td><State of={row.state} /></td>
      <td>
        <a href={linkTo(link)} onClick={inPage(link)}>{row.cluster || 'no cluster name'}</a> <span class="dim opt">{row.id.slice(0, 24).replace(/^([0-9a-f]{8})[0-9a-f]{8}$/, '$1')}</span>
      </td>
      {hasOwners && <td class="opt">{ownerOf(row)}</td>}
      <td class="num">{num(row.n_ranks, 0)}</td>
      <td class="line">{culprit(row)}</td>
      <td class="opt">{row.cause_label ?? ''}{!row.cause && row.reasons[0] && <span class="dim">{row.reasons[0].reason}</span>}</td>
      <td class="opt"><Strip codes={row.strip} /></td>
      <td class="num">{row.late_ms == null ? '' : millis(row.late_ms)}</td>
      <td class="num opt">{row.ended_ms ? row.gpu_seconds_lost && gpuTime(row.gpu_seconds_lost) : row.gpus_lost && range(row.gpus_lost)}</td>
      {hasPrices && <td class="num opt">{row.ended_ms ? row.usd_lost && range(row.usd_lost, '$') : row.usd_per_hour && range(row.usd_per_hour, '$')}</td>}
      <td class="opt line">{row.since_ms ? <Moment ms={row.since_ms} /> : ''}</td>
    </tr>
  )
}

function FirstAgent() {
  const { otlp_grpc_port: port, tls } = health.value ?? {}
  const address = `${location.hostname || 'HOST'}:${port ?? 4317}`
  const commands = `stallscope hub token create --scope ingest > agent.token      # on the hub
sudo stallscope trace --hub ${address}${tls === 'none' ? ' --hub-insecure' : ''} --token-file agent.token      # on each GPU machine`
  return (
    <section class="card" aria-label="Connect the first agent">
      <h2>Connect the first agent</h2>
      <p>Create a token for agents, copy it to a GPU machine, and start the agent there. Its jobs appear here after their first rounds.</p>
      <pre tabIndex={0}>{commands}</pre>
    </section>
  )
}

function RecentIncidents() {
  if (!incidents.value.length) return null
  return (
    <section aria-label="Recent incidents">
      <h2>Recent incidents</h2>
      <Scroll name="Table of closed incidents">
        <table>
          <caption class="hidden">Closed incidents, newest first</caption>
          <thead><tr><th scope="col">State</th><th scope="col">Job</th><th scope="col" class="opt">Summary</th><th scope="col" class="num opt">GPU seconds</th><th scope="col">Since</th></tr></thead>
          <tbody>
            {incidents.value.map(row => (
              <tr class="row" key={row.verdict_id}>
                <td><State of={row.kind} /></td>
                <td><a href={linkTo({ job: row.job })} onClick={inPage({ job: row.job })}>{row.cluster}</a></td>
                <td class="opt">{row.summary}</td>
                <td class="num opt">{num(row.gpu_seconds)}</td>
                <td class="line"><Moment ms={Date.parse(row.since)} /></td>
              </tr>
            ))}
          </tbody>
        </table>
      </Scroll>
    </section>
  )
}

function Health() {
  const now = health.value
  if (!now) return null
  if (now.trace) return <p class="dim">Trace {now.trace}: {now.is_live ? 'it is still growing, and the page updates' : 'the recording has ended'}.</p>
  const facts = [`${num(now.rows_per_s, 0)} collectives per second`]
  if (now.lag_s != null) facts.push(`the diagnosis is ${duration(now.lag_s * 1000)} behind`)
  if (now.queue_rows != null) facts.push(`${plural(now.queue_rows, 'row')} waiting, ${num(now.batches_refused, 0)} batches refused, ${plural(now.rows_not_examined, 'row')} not examined`)
  if (now.rows_left_out) facts.push(`the page left out ${plural(now.rows_left_out, 'row')}`)
  if (now.tls) facts.push(now.tls === 'none' ? 'no TLS' : `TLS ${now.tls}`)
  return (
    <section aria-label="Health of the hub">
      <p class="dim">Hub: {facts.join('; ')}.</p>
      {now.stragglers?.length > 0 && (
        <p class="inconclusive">
          {plural(now.stragglers.length, 'machine')} of {num(now.nodes_reporting, 0)} slower than the machines of the same job:{' '}
          {now.stragglers.map(each => `${each.node} (${each.reason})`).join('; ')}
        </p>
      )}
      {now.caveat && <p class="inconclusive">{now.caveat}</p>}
    </section>
  )
}
