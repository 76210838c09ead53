package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
)

// provider is somebody else's system: a ledger in memory behind two calls. POST /charges charges an amount under an Idempotency-Key, once
// for each key; GET /charges/{key} finds the charge. How a call goes depends on the amount, so that runs compare, and only the first
// call for an amount goes wrong.
type provider struct {
	http.ServeMux

	mu      sync.Mutex
	calls   map[int64]int     // POSTs by amount
	charges map[string]string // by key
	ledger  []string          // "key amount", one for each time that money moved
}

func newProvider() *provider {
	p := &provider{calls: map[int64]int{}, charges: map[string]string{}}
	p.HandleFunc("POST /charges", p.charge)
	p.HandleFunc("GET /charges/{key}", p.find)
	return p
}

// mood is what goes wrong.
type mood int

const (
	fine mood = iota
	hangsAfterCharging
	hangsUpAfterCharging
	hangsUpBeforeCharging
	declines
	isOverloaded
)

// moodFor spreads the moods over amounts. Most calls are fine.
func moodFor(amount int64) mood {
	switch amount % 10 {
	case 1:
		return hangsAfterCharging
	case 3:
		return hangsUpAfterCharging
	case 5:
		return hangsUpBeforeCharging
	case 7:
		return isOverloaded
	case 9:
		return declines
	}
	return fine
}

func (p *provider) charge(w http.ResponseWriter, r *http.Request) {
	amount, err := strconv.ParseInt(r.FormValue("amount"), 10, 64)
	key := r.Header.Get("Idempotency-Key")
	if err != nil || key == "" {
		http.Error(w, "an amount and an Idempotency-Key are needed", http.StatusBadRequest)
		return
	}
	p.mu.Lock()
	p.calls[amount]++
	first := p.calls[amount] == 1
	p.mu.Unlock()
	now := moodFor(amount)
	if now != declines && !first {
		now = fine
	}
	switch now {
	case declines:
		http.Error(w, "card declined", http.StatusPaymentRequired)
		return
	case isOverloaded:
		http.Error(w, "try later", http.StatusServiceUnavailable)
		return
	case hangsUpBeforeCharging:
		panic(http.ErrAbortHandler)
	case fine, hangsAfterCharging, hangsUpAfterCharging:
	}
	charge := p.book(key, amount)
	switch now {
	case hangsAfterCharging:
		<-r.Context().Done() // until the client has given up
	case hangsUpAfterCharging:
		panic(http.ErrAbortHandler)
	case fine, hangsUpBeforeCharging, declines, isOverloaded:
		_, _ = io.WriteString(w, charge)
	}
}

// book moves the money, once for each key.
func (p *provider) book(key string, amount int64) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if charge, done := p.charges[key]; done {
		return charge
	}
	p.ledger = append(p.ledger, fmt.Sprint(key, " ", amount))
	p.charges[key] = fmt.Sprintf("ch_%03d", len(p.ledger))
	return p.charges[key]
}

func (p *provider) find(w http.ResponseWriter, r *http.Request) {
	p.mu.Lock()
	charge, done := p.charges[r.PathValue("key")]
	p.mu.Unlock()
	if !done {
		http.NotFound(w, r)
		return
	}
	_, _ = io.WriteString(w, charge)
}

// api is the provider as our side sees it.
type api struct {
	url    string
	client *http.Client
}

// What a call to the provider may come to, beside success.
var (
	errDeclined   = errors.New("the provider declined")
	errOverloaded = errors.New("the provider is overloaded, and has done nothing")
	errUnknown    = errors.New("the provider did not answer")
)

// charge asks for money.
func (a *api) charge(ctx context.Context, key string, amount int64) (string, error) {
	status, charge, err := a.call(ctx, http.MethodPost, "/charges?amount="+strconv.FormatInt(amount, 10), key)
	switch {
	case err != nil:
		return "", err
	case status == http.StatusPaymentRequired:
		return "", errDeclined
	case status == http.StatusServiceUnavailable:
		return "", errOverloaded
	case status != http.StatusOK:
		return "", fmt.Errorf("the provider answered %d: %s", status, charge)
	}
	return charge, nil
}

// find asks whether a charge has been made.
func (a *api) find(ctx context.Context, key string) (charge string, found bool, err error) {
	status, charge, err := a.call(ctx, http.MethodGet, "/charges/"+key, "")
	if err != nil || status == http.StatusNotFound {
		return "", false, err
	}
	if status != http.StatusOK {
		return "", false, fmt.Errorf("the provider answered %d: %s", status, charge)
	}
	return charge, true, nil
}

func (a *api) call(ctx context.Context, method, path, key string) (status int, body string, err error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, method, a.url+path, nil)
	if err != nil {
		return 0, "", fmt.Errorf("ask the provider: %w", err)
	}
	if key != "" {
		r.Header.Set("Idempotency-Key", key)
	}
	response, err := a.client.Do(r)
	if err != nil {
		return 0, "", fmt.Errorf("%w: %w", errUnknown, err)
	}
	defer response.Body.Close() //nolint:errcheck // it has been read
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return 0, "", fmt.Errorf("%w: %w", errUnknown, err)
	}
	return response.StatusCode, strings.TrimSpace(string(text)), nil
}
