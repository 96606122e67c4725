// node provider.mjs MODULES PORT CLIENT_ID SECRET REDIRECT_URI: an OpenID Connect provider with npm's oidc-provider.
// Every user signs in without a password; the claim `team` of a user is the part of the name before the dash.
const [modules, port, clientId, secret, redirectUri] = process.argv.slice(2)
const { Provider } = await import(`file://${modules}/oidc-provider/lib/index.js`)

const provider = new Provider(`http://127.0.0.1:${port}`, {
  clients: [{ client_id: clientId, client_secret: secret, redirect_uris: [redirectUri], response_types: ['code'], grant_types: ['authorization_code'] }],
  pkce: { required: () => true },
  claims: { openid: ['sub', 'team'] },
  conformIdTokenClaims: false,
  findAccount: (_, id) => ({ accountId: id, claims: () => ({ sub: id, team: id.split('-')[0] }) }),
  features: { devInteractions: { enabled: true } },
})
provider.listen(+port, '127.0.0.1', () => console.log('ready'))
