// Command generate writes the demo's input: payment requests as a provider's API gets them, with the repeats and the mistakes
// that clients make. The seed is fixed, so the output is always the same, byte for byte.
package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: generate FILE")
		os.Exit(2)
	}
	if err := os.WriteFile(os.Args[1], requests(), 0o644); err != nil { //nolint:gosec // an input that everybody may read
		fmt.Fprintln(os.Stderr, "generate:", err)
		os.Exit(1)
	}
}

// payments is how many payments clients mean to make. With their repeats and mistakes that gives about a thousand lines.
const payments = 700

// request is the body that clients send, its members in their order.
type request struct {
	Tenant         string `json:"tenant,omitempty"`
	IdempotencyKey string `json:"idempotency_key,omitempty"`
	Amount         int64  `json:"amount"`
	Currency       string `json:"currency"`
	Customer       string `json:"customer"`
	Description    string `json:"description"`
}

// arrival is a line and when it comes in. One payment is made per unit of time.
type arrival struct {
	at   float64
	line string
}

type generator struct {
	*rand.Rand
	arrivals []arrival
}

// requests returns the file.
func requests() []byte {
	g := &generator{Rand: rand.New(rand.NewPCG(2026, 2))} //nolint:gosec // no secret: the same requests every time
	for n := range payments {
		g.client(n)
	}
	slices.SortStableFunc(g.arrivals, func(a, b arrival) int { return cmp.Compare(a.at, b.at) })
	var file bytes.Buffer
	for _, a := range g.arrivals {
		file.WriteString(a.line)
		file.WriteByte('\n')
	}
	return file.Bytes()
}

// client makes one payment, and whatever goes wrong with it.
func (g *generator) client(n int) {
	r := g.payment(n)
	now := float64(n)
	body := marshal(r)
	switch g.IntN(100) {
	case 0, 1, 2, 3, 4, 5, 6, 7, 8: // the answer did not come in time: the client repeats, once or more often
		for range 1 + g.IntN(4) {
			g.arrive(g.soon(now), body)
		}
	case 9, 10, 11: // nervous: it clicks until something happens
		for range 3 + g.IntN(5) {
			g.arrive(now+0.5, body)
		}
	case 12, 13, 14, 15, 16: // the key is used again for something else
		other := r
		if g.IntN(2) == 0 {
			other.Amount += 100 * (1 + g.Int64N(50))
		} else {
			other.Description += " (Nachtrag)"
		}
		g.arrive(g.soon(now), marshal(other))
		g.arrive(g.soon(now), body)
	case 17, 18, 19: // two tenants choose the same key
		other := g.payment(n)
		other.Tenant, other.IdempotencyKey = g.anotherTenant(r.Tenant), r.IdempotencyKey
		g.arrive(g.soon(now), marshal(other))
	case 20: // keys that look alike: upper case, a space at the end, another form of the same letter
		other := r
		r.IdempotencyKey = fmt.Sprintf("café-%d", n)
		other.IdempotencyKey = []string{
			fmt.Sprintf("CAFÉ-%d", n), fmt.Sprintf("café-%d ", n), fmt.Sprintf("cafe\u0301-%d", n),
		}[g.IntN(3)]
		body = marshal(r)
		g.arrive(g.soon(now), marshal(other))
	case 21: // first refused for its amount, then put right under the same key
		wrong := r
		wrong.Amount = -wrong.Amount * g.Int64N(2)
		g.arrive(now-0.5, marshal(wrong))
	case 22, 23, 24, 25, 26: // it comes damaged, and the client never knows
		g.arrive(now, g.damage(r, body))
		return
	case 27, 28: // damaged first, whole when repeated
		g.arrive(now-0.5, g.damage(r, body))
	case 29: // an empty line between two requests
		g.arrive(now, []string{"", "", "  "}[g.IntN(3)])
	}
	g.arrive(now, body)
}

func (g *generator) arrive(at float64, line string) {
	g.arrivals = append(g.arrivals, arrival{at, line})
}

// soon is a moment at which a client repeats a request.
func (g *generator) soon(now float64) float64 { return now + 1 + 25*g.Float64() }

// damage returns the request as nobody should have sent it.
func (g *generator) damage(r request, body string) string {
	switch g.IntN(14) {
	case 0, 1: // the client library is old
		r.IdempotencyKey = ""
	case 2:
		r.Tenant = ""
	case 3, 4: // the key is the whole order
		r.IdempotencyKey = strings.Repeat(r.IdempotencyKey+"|", 513/len(r.IdempotencyKey)+g.IntN(3))
	case 5, 12, 13: // cut off on the way
		return body[:len(body)/4+g.IntN(len(body)/2)]
	case 6: // units and minor units
		return strings.Replace(body, fmt.Sprintf(`"amount":%d`, r.Amount), fmt.Sprintf(`"amount":"%d.%02d"`, r.Amount/100, r.Amount%100), 1)
	case 7:
		return strings.Replace(body, fmt.Sprintf(`"amount":%d`, r.Amount), fmt.Sprintf(`"amount":%d.5`, r.Amount), 1)
	case 8: // not what this port is for
		return []string{"GET /v1/payments HTTP/1.1", `["payment"]`, "<payment/>", "null"}[g.IntN(4)]
	case 9: // Latin-1
		r.Description = "Z\xfcrich"
		return strings.Replace(marshal(r), `\ufffd`, "\xfc", 1)
	case 10:
		r.Amount = 0
	case 11:
		r.Currency = strings.ToLower(r.Currency)
	}
	return marshal(r)
}

// marshal writes the body as clients do: without the escapes for HTML that Go adds unasked.
func marshal(r request) string {
	var b strings.Builder
	encoder := json.NewEncoder(&b)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(r); err != nil {
		panic(err) // strings and a number
	}
	return strings.TrimSuffix(b.String(), "\n")
}

var (
	tenants    = []string{"acct_aurora", "acct_bluepeak", "acct_cobalt", "acct_delta", "acct_ember"}
	currencies = []string{"EUR", "EUR", "EUR", "USD", "USD", "GBP", "JPY", "CHF", "SEK", "PLN"}
)

func (g *generator) anotherTenant(not string) string {
	i := slices.Index(tenants, not)
	return tenants[(i+1+g.IntN(len(tenants)-1))%len(tenants)]
}

func (g *generator) payment(n int) request {
	return request{
		Tenant:         tenants[g.IntN(len(tenants))],
		IdempotencyKey: g.key(n),
		Amount:         int64(100*(1+g.IntN(400)) - g.IntN(2)), // prices like 9.99
		Currency:       currencies[g.IntN(len(currencies))],
		Customer:       fmt.Sprintf("cus_%014x", g.Uint64N(1<<56)),
		Description:    g.description(n),
	}
}

// key returns a key as clients choose them: mostly a UUID, some with a system of their own.
func (g *generator) key(n int) string {
	switch g.IntN(10) {
	case 0:
		return fmt.Sprintf("order-%d", 100_000+n)
	case 1:
		return fmt.Sprintf("rechnung/2026/%05d#1", n)
	}
	a, b := g.Uint64(), g.Uint64()
	return fmt.Sprintf("%08x-%04x-4%03x-%04x-%012x", a>>32, a>>16&0xffff, a&0xfff, 0x8000|b>>50, b&0xffffffffffff)
}

func (g *generator) description(n int) string {
	switch g.IntN(16) {
	case 0:
		return "Monatsabo, größeres Paket"
	case 1:
		return "Café crème ×2"
	case 2:
		return fmt.Sprintf("注文番号 %d", n)
	case 3:
		return fmt.Sprintf("Zahlung für Rechnung %d", 2_026_000+n)
	case 4:
		return fmt.Sprintf("Подписка, месяц %d", 1+n%12)
	case 5:
		return fmt.Sprintf("Invoice #%d — net 30", n)
	case 6:
		return "قهوة وكعك"
	case 7:
		return "Blumenstrauß 💐 & Karte"
	case 8:
		return "Smörgås <liten>"
	case 9:
		return "Ψηφιακό εισιτήριο 🎫"
	case 10:
		return `Donation "thank you" \o/`
	case 11:
		return "Two lines:\n\tone with a tab"
	case 12:
		return "नमस्ते, चाय 👩‍👩‍👧‍👦"
	case 13:
		return ""
	case 14:
		return strings.Repeat("sehr lange Beschreibung, ", 10+g.IntN(30))
	}
	return fmt.Sprintf("Ticket row %d, seat %d", 1+g.IntN(40), 1+g.IntN(30))
}
