// Package httpidem is net/http middleware that makes requests safe to repeat: it keeps the Idempotency-Key header's promise on a
// [pgstore.Store].
//
//	idempotent, err := httpidem.New(store, func(r *http.Request) string { return account(r) })
//	...
//	mux.Handle("POST /orders", authenticated(idempotent(createOrder)))
//
// The first request with a key runs the handler. Every repeat gets the handler's response, with the header
// "Idempotent-Replayed: true", and the handler does not run. A repeat that comes while the handler runs gets 409, another request
// under the same key 422. Nothing runs unprotected: where the store cannot be asked, the answer is 503.
//
// It implements draft-ietf-httpapi-idempotency-key-header-07, which expired in April 2026 and never became an RFC. docs/http.md
// goes through the draft's demands one by one, and lists every answer with its body.
//
// # Where it stands
//
// Authentication and authorisation run before it, so that a replay is as protected as the first response: the tenant function can
// rely on them. Put it behind the route's pattern where you can ([http.ServeMux] sets it), so that the pattern becomes the operation
// of the key; else method and path do.
//
// Middleware that encodes for the one client (gzip) belongs outside: then each repeat is encoded for whoever sends it. The handler
// is not shown the request's Accept-Encoding, so that what is inside does not encode what is stored for everyone.
//
// # What the handler meets
//
// Its request body is in memory already, bounded by [WithMaxRequestBytes]. Its context outlives the client: it ends when the lease is
// lost, with a cause that is pgstore.ErrStaleAttempt or pgstore.ErrLeaseExpired, or when [WithHandlerTimeout] passes. [FromContext]
// tells it whether an attempt before it was abandoned in the middle: then it has to find out what became of that one's effect before
// it repeats it.
//
// Its response is held back until it is recorded, and then sent: what a client has seen is what every repeat will see. A response
// over [WithMaxResponseBytes], one that is flushed, and a hijacked connection go to the client as they come. They are not stored; a
// repeat gets 409 with a problem type of its own, and the handler does not run again. Package http's ResponseController works.
//
// # How a handler ends
//
// A response is final and replayed, whatever its status, unless the status promises that nothing has happened (see
// [ReleasingStatuses] and [WithReleasingStatuses]) or the handler says so with [Release]: then the key is free at once. A panic is
// a crash: it goes on, nothing is stored, and the key is held until its lease lapses.
package httpidem
