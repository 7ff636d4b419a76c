{{/* Names leave room for "-launcher" and the number of a pod. */}}
{{- define "horovod.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "horovod.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "horovod.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "horovod.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "horovod.selector" -}}
app.kubernetes.io/name: {{ include "horovod.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "horovod.labels" -}}
{{ include "horovod.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "horovod.secret" -}}
{{- default (include "horovod.fullname" .) .Values.existingSecret -}}
{{- end -}}

{{/* What the pods of launcher and workers have in common: `root` is the chart, `place` the values of the part. */}}
{{- define "horovod.pod" -}}
restartPolicy: Never
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: 60
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .root.Values.runAsUser }}
  runAsGroup: {{ .root.Values.runAsUser }}
  fsGroup: {{ .root.Values.runAsUser }}
  seccompProfile: {type: RuntimeDefault}
{{- if .root.Values.hostNetwork }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{- with .root.Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .root.Values.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .place.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .place.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .place.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
volumes:
  - name: horovod-key
    secret: {secretName: {{ include "horovod.secret" .root }}, defaultMode: 0440}
  - name: tmp
    emptyDir: {}
{{- with .root.Values.volumes }}
{{ toYaml . | indent 2 }}
{{- end }}
{{- end -}}

{{- define "horovod.container" -}}
image: {{ printf "%s:%s" .root.Values.image.repository (default .root.Chart.AppVersion .root.Values.image.tag) | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
env:
  - {name: HOROVOD_JOB_KEY_FILE, value: /etc/horovod/key}
  - {name: HOROVOD_PORT_RANGE, value: {{ .root.Values.portRange | quote }}}
  - {name: HOME, value: /tmp}
  - {name: PYTHONDONTWRITEBYTECODE, value: "1"}
{{- with .root.Values.env }}
{{ toYaml . | indent 2 }}
{{- end }}
{{- with .root.Values.envFrom }}
envFrom: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .place.resources }}
resources: {{- toYaml . | nindent 2 }}
{{- end }}
volumeMounts:
  # A single file: a config.yaml that the image has in this folder stays visible.
  - {name: horovod-key, mountPath: /etc/horovod/key, subPath: key, readOnly: true}
  - {name: tmp, mountPath: /tmp}
{{- with .root.Values.volumeMounts }}
{{ toYaml . | indent 2 }}
{{- end }}
{{- end -}}
