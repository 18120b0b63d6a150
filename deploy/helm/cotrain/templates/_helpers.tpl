{{- define "cotrain.fullname" -}}
{{- if contains "cotrain" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-cotrain" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "cotrain.selector" -}}
app.kubernetes.io/name: cotrain
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "cotrain.labels" -}}
{{ include "cotrain.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "cotrain.image" -}}
{{- $tag := .root.Values.images.tag | default .root.Chart.AppVersion -}}
{{- with .root.Values.images.registry }}{{ . }}/{{ end }}{{ .image }}:{{ $tag }}
{{- end }}

{{- /* The claim of all processes except Redis. */ -}}
{{- define "cotrain.dataClaim" -}}
{{ .Values.data.existingClaim | default (printf "%s-data" (include "cotrain.fullname" .)) }}
{{- end }}

{{- define "cotrain.redisUrl" -}}
{{ .Values.redis.external.url | default (printf "redis://%s-redis:6379/0" (include "cotrain.fullname" .)) }}
{{- end }}

{{- /* Restrictions of a pod. Kubernetes adds no variables of services, because COTRAIN_PORT is one of our settings. */ -}}
{{- define "cotrain.pod" -}}
automountServiceAccountToken: false
{{- with .root.Values.blobs.serviceAccount }}
serviceAccountName: {{ . }}
{{- end }}
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .of.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .of.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "cotrain.container" -}}
imagePullPolicy: {{ .Values.images.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- /* Variables of every process, then `own`, then those in the values of this kind of process. */ -}}
{{- define "cotrain.env" -}}
{{- $root := .root -}}
{{- $all := dict
  "COTRAIN_REDIS_URL" (include "cotrain.redisUrl" $root)
  "COTRAIN_DATA_DIR" "/data"
  "COTRAIN_METRICS_HOST" "0.0.0.0"
  "COTRAIN_METRICS_PORT" "9464" -}}
{{- if $root.Values.blobs.url }}{{ $_ := set $all "COTRAIN_BLOBS" $root.Values.blobs.url }}{{ end -}}
{{- if $root.Values.secretKeys.redisPassword }}{{ $_ := set $all "COTRAIN_REDIS_PASSWORD_FILE" (printf "/secret/%s" $root.Values.secretKeys.redisPassword) }}{{ end -}}
{{- $merged := mergeOverwrite $all .own $root.Values.env (.of.env | default dict) -}}
{{- range $name, $value := $merged }}
- name: {{ $name }}
  value: {{ $value | toString | quote }}
{{- end }}
{{- end }}

{{- define "cotrain.mounts" -}}
- {name: data, mountPath: /data}
- {name: tmp, mountPath: /tmp}
{{- if .Values.secretKeys.redisPassword }}
- {name: secret, mountPath: /secret, readOnly: true}
{{- end }}
{{- if .Values.redis.external.caSecret }}
- {name: redis-ca, mountPath: /redis-ca, readOnly: true}
{{- end }}
{{- end }}

{{- /* Volume of the data folder. With an object store, the own claim of a worker has this name. */ -}}
{{- define "cotrain.dataVolume" -}}
{{- if not .Values.blobs.url }}
- name: data
  persistentVolumeClaim: {claimName: {{ include "cotrain.dataClaim" . }}}
{{- end }}
{{- end }}

{{- define "cotrain.scratchVolume" -}}
{{- if .Values.blobs.url }}
- name: data
  emptyDir: {}
{{- end }}
{{- end }}

{{- /* Credentials of a process that stores blobs. */ -}}
{{- define "cotrain.blobsFrom" -}}
{{- with .Values.blobs.secret }}
envFrom: [{secretRef: {name: {{ . }}}}]
{{- end }}
{{- end }}

{{- define "cotrain.volumes" -}}
{{- include "cotrain.dataVolume" . }}
- name: tmp
  emptyDir: {}
{{- if .Values.secretKeys.redisPassword }}
- name: secret
  secret:
    secretName: {{ .Values.secret }}
    defaultMode: 0440
    items: [{key: {{ .Values.secretKeys.redisPassword }}, path: {{ .Values.secretKeys.redisPassword }}}]
{{- end }}
{{- with .Values.redis.external.caSecret }}
- name: redis-ca
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{- define "cotrain.modelMount" -}}
{{- if .Values.models.existingClaim }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}

{{- define "cotrain.modelVolume" -}}
{{- with .Values.models.existingClaim }}
- name: models
  persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
{{- end }}
{{- end }}

{{- /* Name of a base model in requests of clients. */ -}}
{{- define "cotrain.modelName" -}}
{{ first (splitList "=" .baseModel) }}
{{- end }}

{{- /* Rules of network policies. */ -}}
{{- define "cotrain.toDns" -}}
- ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}]
{{- end }}

{{- define "cotrain.toRedis" -}}
{{- if .Values.redis.external.url }}
- ports: [{{ range $i, $port := .Values.redis.external.ports }}{{ if $i }}, {{ end }}{port: {{ $port }}}{{ end }}]
{{- else }}
- to:
    - podSelector:
        matchLabels: {{ include "cotrain.selector" (dict "root" . "component" "redis") | nindent 10 }}
  ports: [{port: 6379}]
{{- end }}
{{- end }}

{{- define "cotrain.fromScrapers" -}}
- from: {{ toYaml (.Values.networkPolicies.metrics | default (list (dict "podSelector" (dict)))) | nindent 4 }}
  ports: [{port: 9464}]
{{- end }}
