package httpidem

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"errors"
	"html/template"
	"mime"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/archlab/idempotency/pgstore"
)

// specification is what a service publishes: the draft's section 2.5 demands it, expiry included.
type specification struct {
	Draft             string        `json:"draft"`
	Header            string        `json:"header"`
	Required          bool          `json:"required"`
	QuotedOnly        bool          `json:"quoted_only"`
	MaxKeyBytes       int64         `json:"max_key_bytes"`
	Methods           []string      `json:"methods"`
	Fingerprint       string        `json:"fingerprint"`
	RetentionSeconds  float64       `json:"retention_seconds"`
	LeaseSeconds      float64       `json:"lease_seconds"`
	WaitSeconds       float64       `json:"wait_seconds"`
	MaxRequestBytes   int64         `json:"max_request_bytes"`
	MaxResponseBytes  int64         `json:"max_response_bytes"`
	ReleasingStatuses []int         `json:"releasing_statuses"`
	ReplayedHeader    string        `json:"replayed_header"`
	NotReplayed       []string      `json:"not_replayed"`
	Problems          []problemSpec `json:"problems"`
}

type problemSpec struct {
	Name   string `json:"-"`
	Type   string `json:"type"`
	Status int    `json:"status"`
	Title  string `json:"title"`
	Detail string `json:"detail"`
	Repeat retry  `json:"repeat"`
}

//go:embed spec.html
var specPage string

var specTemplate = template.Must(template.New("spec").Funcs(template.FuncMap{
	"seconds": func(s float64) string { return inWords(time.Duration(s * float64(time.Second))) },
	"bytes":   bytesInWords,
	"status":  func(code int) string { return strings.TrimSpace(strconv.Itoa(code) + " " + http.StatusText(code)) },
	"repeat":  func(r retry) string { return repeatInWords[r] },
	"list":    func(names []string) string { return strings.Join(names, " or ") },
}).Parse(specPage))

var repeatInWords = map[retry]string{
	retryNever:   "Correct the request first.",
	retryAfter:   "Send the same request again, after the time in Retry-After.",
	retryOutcome: "Find out what happened before you send anything.",
}

// Spec returns a handler that publishes the service's idempotency specification, made from the configuration in force: as HTML for
// people, and as JSON for programs that accept application/json rather. Mount it where [WithDocumentation] says that it is. It is
// public: it says nothing of tenants, keys or the store.
func (m *Middleware) Spec() http.Handler {
	spec := m.specification()
	asJSON, errJSON := json.MarshalIndent(spec, "", "  ")
	asJSON = append(asJSON, '\n')
	var asHTML bytes.Buffer
	errHTML := specTemplate.Execute(&asHTML, spec)
	if err := errors.Join(errJSON, errHTML); err != nil {
		panic(err) // the template does not fit its data: the program is wrong, and a test would say so
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, "The specification can be read with GET.", http.StatusMethodNotAllowed)
			return
		}
		header := w.Header()
		header.Add("Vary", "Accept")
		header.Set("Cache-Control", "max-age=300")
		header.Set("X-Content-Type-Options", "nosniff")
		if prefersJSON(r.Header["Accept"]) {
			header.Set("Content-Type", "application/json")
			_, _ = w.Write(asJSON)
			return
		}
		header.Set("Content-Type", "text/html; charset=utf-8")
		header.Set("Content-Language", "en")
		header.Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
		_, _ = w.Write(asHTML.Bytes())
	})
}

func (m *Middleware) specification() specification {
	limits := m.store.Limits()
	spec := specification{
		Draft:             DocumentationDefault,
		Header:            KeyHeader,
		Required:          !m.optionalKey,
		QuotedOnly:        m.strictKey,
		MaxKeyBytes:       pgstore.MaxKeyComponentBytes,
		Methods:           sorted(m.methods),
		Fingerprint:       "method, path, query and body, byte for byte; no header",
		RetentionSeconds:  limits.Retention.Seconds(),
		LeaseSeconds:      limits.Lease.Seconds(),
		WaitSeconds:       m.wait.Seconds(),
		MaxRequestBytes:   m.maxRequest,
		MaxResponseBytes:  int64(m.maxResponse),
		ReleasingStatuses: sorted(m.releasing),
		ReplayedHeader:    ReplayedHeader,
		NotReplayed:       slices.Clone(notReplayed),
	}
	if m.ownFingerprint {
		spec.Fingerprint = "chosen by this service"
	}
	for _, p := range problems() {
		spec.Problems = append(spec.Problems, problemSpec{
			Name: p.name, Type: m.documentation + "#" + p.name, Status: p.status, Title: p.title, Detail: p.detail, Repeat: p.retry,
		})
	}
	return spec
}

// prefersJSON reports whether an Accept header ranks JSON above HTML.
func prefersJSON(accept []string) bool {
	best := map[string]float64{}
	for line := range slices.Values(accept) {
		for element := range strings.SplitSeq(line, ",") {
			mediaType, params, err := mime.ParseMediaType(element)
			if err != nil {
				continue
			}
			quality := 1.0
			if q, err := strconv.ParseFloat(params["q"], 64); err == nil {
				quality = q
			}
			best[mediaType] = max(best[mediaType], quality)
		}
	}
	return best["application/json"] > best["text/html"]
}

// inWords writes a duration in the largest unit that it is a whole number of.
func inWords(d time.Duration) string {
	for _, unit := range [...]struct {
		length time.Duration
		name   string
	}{{24 * time.Hour, "day"}, {time.Hour, "hour"}, {time.Minute, "minute"}, {time.Second, "second"}} {
		if d >= unit.length && d%unit.length == 0 {
			return counted(int64(d/unit.length), unit.name)
		}
	}
	return d.String()
}

// bytesInWords writes a size in the largest binary unit that it is a whole number of.
func bytesInWords(size int64) string {
	const unit = 1024
	names := [...]string{"byte", "KiB", "MiB", "GiB"}
	i := 0
	for ; i < len(names)-1 && size >= unit && size%unit == 0; i++ {
		size /= unit
	}
	if i == 0 {
		return counted(size, names[i])
	}
	return strconv.FormatInt(size, 10) + " " + names[i]
}

// counted writes a number with its noun.
func counted(n int64, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return strconv.FormatInt(n, 10) + " " + noun
}
