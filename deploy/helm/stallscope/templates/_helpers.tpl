{{- define "stallscope.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "stallscope.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" -}}
{{- else if contains (include "stallscope.name" .) .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "stallscope.name" .) | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "stallscope.selector" -}}
app.kubernetes.io/name: {{ include "stallscope.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "stallscope.labels" -}}
{{ include "stallscope.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "stallscope.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ default .root.Chart.AppVersion .image.tag }}
{{- end -}}
{{- end -}}

{{- define "stallscope.kubeVersion" -}}
{{- default .Capabilities.KubeVersion.Version .Values.kubeVersion -}}
{{- end -}}

{{- define "stallscope.hubAddress" -}}
{{- if .Values.hub.enabled -}}
{{ include "stallscope.fullname" . }}-hub.{{ .Release.Namespace }}.svc:4317
{{- else -}}
{{ .Values.hub.address }}
{{- end -}}
{{- end -}}

{{- define "stallscope.tlsSecret" -}}
{{- default (printf "%s-hub-tls" (include "stallscope.fullname" .)) .Values.hub.tlsSecret -}}
{{- end -}}

{{- define "stallscope.tokenSecret" -}}
{{- default (printf "%s-hub-tokens" (include "stallscope.fullname" .)) .Values.hub.tokenSecret -}}
{{- end -}}

{{- define "stallscope.peers" -}}
{{ include "stallscope.fullname" . }}-hub-peers.{{ .Release.Namespace }}.svc
{{- end -}}

{{- define "stallscope.isShared" -}}
{{- $hub := .Values.hub -}}
{{- if and (gt (int $hub.replicas) 1) (not $hub.shared.postgres) -}}
{{- fail "hub.replicas above 1 needs hub.shared.postgres and hub.shared.bucket" -}}
{{- end -}}
{{- if ne (empty $hub.shared.postgres) (empty $hub.shared.bucket) -}}
{{- fail "hub.shared.postgres and hub.shared.bucket belong together; give both" -}}
{{- end -}}
{{- if and (gt (int $hub.replicas) 1) $hub.persistence.existingClaim -}}
{{- fail "hub.persistence.existingClaim is one volume; several hubs need a volume each" -}}
{{- end -}}
{{- if $hub.shared.postgres -}}true{{- end -}}
{{- end -}}

{{- define "stallscope.storesEnv" -}}
- {name: STALLSCOPE_HUB_SHARED, value: {{ .Values.hub.shared.postgres | quote }}}
- {name: STALLSCOPE_HUB_BUCKET, value: {{ .Values.hub.shared.bucket | quote }}}
{{- with .Values.hub.shared.postgresSecret }}
- {name: PGPASSWORD, valueFrom: {secretKeyRef: {name: {{ . }}, key: password}}}
{{- end }}
{{- with .Values.hub.shared.bucketSecret }}
- {name: AWS_ACCESS_KEY_ID, valueFrom: {secretKeyRef: {name: {{ . }}, key: access-key-id}}}
- {name: AWS_SECRET_ACCESS_KEY, valueFrom: {secretKeyRef: {name: {{ . }}, key: secret-access-key}}}
{{- end }}
{{- end -}}

{{- define "stallscope.sharedEnv" -}}
{{ include "stallscope.storesEnv" . }}
- {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
- {name: STALLSCOPE_HUB_PEER_HOST, value: "$(POD_NAME).{{ include "stallscope.peers" . }}"}
- {name: STALLSCOPE_HUB_DIRECT, value: "$(POD_NAME).{{ include "stallscope.peers" . }}:4317"}
{{- end -}}

{{- define "stallscope.storesEgress" -}}
- ports:  # DNS
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
- ports:
    {{- range .Values.hub.networkPolicy.egressPorts }}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
  {{- with .Values.hub.networkPolicy.egressTo }}
  to: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{- define "stallscope.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}
