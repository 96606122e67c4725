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

{{- define "stallscope.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}
