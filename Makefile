# GNU make 4 and bash. `make` or `make help` lists the targets.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-builtin-rules
.DEFAULT_GOAL := help

# What can be set on the command line: make test PKG=./pgstore TEST_ARGS='-run Concurrent -v'
PKG ?= ./...
TEST_ARGS ?=
TEST_TIMEOUT ?= 20m
VERSIONS ?= 15 17 18
FUZZTIME ?= 20s
BENCH ?= .
DEMO_ARGS ?=
SERVE_ARGS ?=
POSTGRES_IMAGE ?=
POSTGRES_PORT ?= 5432

GOLANGCI_VERSION := v2.15.0
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/archlab-idempotency
GOLANGCI := $(CACHE)/golangci-lint-$(GOLANGCI_VERSION)/golangci-lint

IMAGE := archlab-idempotency/postgres
GO_TEST = go test -race -count=1 -p 2 -parallel 4 -timeout $(TEST_TIMEOUT) $(TEST_ARGS) $(PKG)
COMPOSE = $$(docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose) --project-name idempotency

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: ## a thousand payment requests, workers killed in the middle, every payment exactly once; DEMO_ARGS
	@echo 'Building the demo; the first time takes a minute or two.'
	@go run ./examples/payments $(DEMO_ARGS)

.PHONY: queue
queue: ## messages that arrive more than once, consumers that crash, every message booked exactly once
	@go run ./examples/queue

.PHONY: provider
provider: ## a payment provider that times out after it charged, every payment charged exactly once
	@go run ./examples/provider

.PHONY: serve
serve: ## a small order service with the HTTP middleware, to send requests to; SERVE_ARGS
	@echo 'Building the service; the first time takes a minute or two.'
	@go run ./examples/orders $(SERVE_ARGS)

.PHONY: test
test: ## the whole suite with the race detector on a real PostgreSQL; PKG, TEST_ARGS
	@echo 'Testing $(PKG) with the race detector on a real PostgreSQL: a container or binaries, whatever is found; see docs/testing.md.'
	@echo 'Each package reports when it is done. The first time, compiling takes a few minutes.'
	@$(GO_TEST)

.PHONY: test-durable
test-durable: export PGTEST_DURABLE := 1
test-durable: test ## the suite on a server with fsync and its kin on

.PHONY: test-matrix
test-matrix: ## the suite on PostgreSQL 15, 17 and 18 in containers; builds missing images first; VERSIONS
	@docker/build-image.sh $(VERSIONS)
	@export PGTEST_REQUIRE=container; unset TEST_DATABASE_URL; failed=; \
	for version in $(VERSIONS); do \
		echo "Testing $(PKG) on PostgreSQL $$version"; \
		TEST_POSTGRES_IMAGE=$(IMAGE):$$version $(GO_TEST) || failed="$$failed $$version"; \
	done; \
	[ -z "$$failed" ] || { echo "failed on PostgreSQL$$failed" >&2; exit 1; }

.PHONY: lint
lint: $(GOLANGCI) ## golangci-lint, at the version pinned here
	$(GOLANGCI) run

# Under another name first: an interrupted build must not pass for a finished one.
$(GOLANGCI):
	@echo 'Building golangci-lint $(GOLANGCI_VERSION), once: about ten minutes on two cores.'
	@mkdir -p '$(@D)'
	@build=$$(mktemp -d '$(@D)/build.XXXXXX'); trap 'rm -rf "$$build"' EXIT; \
	GOBIN=$$build go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI_VERSION); \
	mv "$$build/golangci-lint" '$@'

.PHONY: lint-tool
lint-tool: $(GOLANGCI) ## build the linter, without running it

.PHONY: fmt
fmt: ## format the Go code
	gofmt -s -w .

.PHONY: verify
verify: ## go vet, formatting, tidy modules, and nothing generated is out of date
	go vet ./...
	@files=$$(gofmt -s -l .); [ -z "$$files" ] || { echo "not formatted (make fmt):" $$files >&2; exit 1; }
	go mod tidy -diff
	@state() { git diff; git ls-files --others --exclude-standard -z | xargs -0 -r sha256sum; }; \
	before=$$(state); echo 'go generate ./...'; go generate ./...; \
	[ "$$before" = "$$(state)" ] || { git status --short >&2; echo 'what is generated was out of date and is new now: commit it' >&2; exit 1; }

.PHONY: fuzz
fuzz: ## each fuzz target for a short time; FUZZTIME
	@{ grep -roE --include='*_test.go' '^func Fuzz[A-Za-z0-9_]+' . || { echo 'no fuzz target found' >&2; false; }; } | \
	while IFS=: read -r file func; do \
		echo "$${file%/*} $${func#func }"; \
		go test -run '^$$' -fuzz "^$${func#func }$$" -fuzztime $(FUZZTIME) "$${file%/*}" </dev/null; \
	done

.PHONY: bench
bench: ## the benchmarks; PKG, BENCH (a pattern)
	@go test -run '^$$' -bench '$(BENCH)' -benchmem -timeout $(TEST_TIMEOUT) $(TEST_ARGS) $(PKG)

.PHONY: image
image: ## build the PostgreSQL images that are missing, from Debian's packages: one to two minutes each; VERSIONS
	@docker/build-image.sh $(VERSIONS)

.PHONY: dev
dev: ## start a PostgreSQL for development and print its URL; POSTGRES_IMAGE, POSTGRES_PORT
	@image='$(POSTGRES_IMAGE)'; \
	if [ -z "$$image" ] && docker image inspect $(IMAGE):17 >/dev/null 2>&1; then image=$(IMAGE):17; fi; \
	export POSTGRES_IMAGE=$${image:-postgres:17} POSTGRES_PORT=$(POSTGRES_PORT); compose="$(COMPOSE)"; \
	echo "Starting $$POSTGRES_IMAGE"; \
	$$compose up -d || { echo 'Where no image registry answers, `make image VERSIONS=17` builds an image first.' >&2; exit 1; }; \
	container=$$($$compose ps -q postgres); \
	until [ "$$(docker inspect --format '{{ .State.Health.Status }}' "$$container")" = healthy ]; do \
		[ "$$(docker inspect --format '{{ .State.Running }}/{{ .State.Health.Status }}' "$$container")" = true/starting ] || \
			{ $$compose logs --tail 20 >&2; exit 1; }; \
		sleep 0.5; \
	done; \
	echo "postgres://idempotency:idempotency@127.0.0.1:$$POSTGRES_PORT/idempotency?sslmode=disable"

.PHONY: dev-down
dev-down: ## remove the development server and its data
	@$(COMPOSE) down --volumes

.PHONY: clean
clean: ## remove what builds and tests left in this folder
	rm -rf bin
	git clean -fqX -- '*.test' '*.out' '*.prof' 'coverage.*'
