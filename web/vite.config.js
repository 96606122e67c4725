// One script and one style sheet, named by their content; no inline script, no data: URI. So the policy
// script-src 'self'; style-src 'self' suffices.
export default {
  base: '/ui/',
  oxc: { jsx: { runtime: 'automatic', importSource: 'preact' } },
  build: {
    outDir: '../src/stallscope/page/built',
    emptyOutDir: true,
    target: 'es2022',
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0,
    cssCodeSplit: false,
  },
}
