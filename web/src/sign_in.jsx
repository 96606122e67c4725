// Sign-in with a token or an identity provider.
import { signal } from '@preact/signals'
import { get, request } from './api.js'
import { about, problem, query } from './state.js'

const error = signal('')
const MESSAGES = {
  failed: 'The identity provider did not sign you in. The audit log of the hub has the reason.',
  link_expired: 'This share link has expired or was revoked. Ask for a new link.',
}

async function signIn(event) {
  event.preventDefault()
  error.value = ''
  try {
    await request('/login', { token: new FormData(event.target).get('token') })
    about.value = await get('/api/v1/page/about')
    problem.value = ''
  } catch (failure) {
    error.value = failure.message
  }
}

export function SignIn() {
  const ways = about.value.sign_in
  return (
    <main>
      <section class="card login" aria-label="Sign in">
        <h1>stallscope</h1>
        {ways.includes('token') && (
          <form onSubmit={signIn}>
            <label for="token">Token with the scope <code>read</code></label>
            <input id="token" name="token" type="password" autocomplete="current-password" required autofocus />
            <button>Sign in</button>
          </form>
        )}
        {ways.includes('oidc') && <a class="button" href="/oidc/start">Sign in with the identity provider</a>}
        {!ways.length && <p>The session has ended. Start <code>stallscope dashboard</code> again, and open its new link.</p>}
        <p role="alert" class="straggler">{error.value || MESSAGES[query.value.get('sign_in')] || ''}</p>
        {ways.includes('token') && <p class="dim">Create a token on the hub: <code>stallscope hub token create --scope read,sql</code></p>}
      </section>
    </main>
  )
}
