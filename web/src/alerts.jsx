// The alerts of an incident: where they went, and the buttons that acknowledge and silence them.
import { signal } from '@preact/signals'
import { useEffect } from 'preact/hooks'
import { get, request, shown } from './api.js'
import { when } from './format.js'

const SILENCE = '2h'
const answer = signal(null)

const load = incident => get(`/api/v1/alerts?${new URLSearchParams({ incident })}`)

/** Alerts with one key went to several receivers. */
function byKey(alerts) {
  const out = new Map()
  for (const alert of alerts) out.set(alert.key, { ...alert, receivers: [...(out.get(alert.key)?.receivers ?? []), alert.receiver] })
  return [...out.values()]
}

export function Alerts({ row, verdict }) {
  const incident = row.verdict_id
  const reload = async () => {
    const loaded = await load(incident)
    answer.value = { ...loaded, incident }
  }
  useEffect(() => { shown(reload) }, [incident, row.confirmed_ms])
  const change = (path, body, method) => () => shown(async () => {
    await request(path, body, method)
    await reload()
  })
  if (answer.value?.incident !== incident || !answer.value.has_receivers) return null
  const { silences } = answer.value
  const match = { cluster: [row.cluster], kind: [row.state], ...(verdict?.node && { node: [verdict.node] }) }
  return (
    <div>
      <h3>Alerts</h3>
      {!answer.value.alerts.length && <p class="dim">No alert about this incident has been sent.</p>}
      {byKey(answer.value.alerts).map(alert => (
        <p key={alert.key} class="tools">
          <span>{alert.receivers.join(', ')}, {when(Date.parse(alert.raised))}{alert.delivered === 'no' && <>, not delivered yet {alert.last_error}</>}{alert.acknowledged_by && <>, acknowledged by {alert.acknowledged_by}</>}</span>
          <button class="small" onClick={change(`/api/v1/alerts/${encodeURIComponent(alert.key)}/acknowledge`, alert.acknowledged_by ? undefined : {}, alert.acknowledged_by ? 'DELETE' : 'POST')}>
            {alert.acknowledged_by ? 'Undo' : 'Acknowledge'}
          </button>
        </p>
      ))}
      {silences.map(silence => (
        <p key={silence.silence_id} class="tools">
          <span>Silenced until {when(Date.parse(silence.until))} by {silence.made_by}</span>
          <button class="small" onClick={change(`/api/v1/alerts/silences/${silence.silence_id}`, undefined, 'DELETE')}>End the silence</button>
        </p>
      ))}
      {!silences.length && <button class="small" onClick={change('/api/v1/alerts/silences', { match, duration: SILENCE, comment: 'from the page' })}>Silence for 2 hours</button>}
    </div>
  )
}
