package pgtest

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

// thisProcess names this process so that another one can tell later whether it still runs: a process number alone is given
// again, after a restart of the machine all the more.
func thisProcess() string {
	pid := os.Getpid()
	return fmt.Sprintf("%s/%d/%s", world(), pid, startOf(pid))
}

// hasGone reports whether the process that thisProcess named runs no more. Where /proc does not tell, it is taken to run. If it was
// named in another boot, that of this machine before or that of another machine with the same engine, it has gone if what it owned
// is idle.
func hasGone(owner string, idle bool) bool {
	boot, rest, _ := strings.Cut(owner, "/")
	number, start, ok := strings.Cut(rest, "/")
	pid, err := strconv.Atoi(number)
	if !ok || err != nil || boot == "" || start == "" {
		return false
	}
	bootThen, namespaceThen, _ := strings.Cut(boot, " ")
	bootNow, namespaceNow, _ := strings.Cut(world(), " ")
	if bootThen != bootNow {
		return bootNow != "" && idle
	}
	return namespaceThen == namespaceNow && startOf(pid) != start
}

// world names the boot of this machine and the namespace of process numbers, within which a number means something.
func world() string {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	namespace, err := os.Readlink("/proc/self/ns/pid")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(boot)) + " " + namespace
}

// startOf returns when a process started, in the kernel's ticks since the machine did, or nothing if there is none.
func startOf(pid int) string {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return ""
	}
	// The second field is the program's name in parentheses, and may hold anything; the start is the 22nd.
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	const start = 22 - 3
	if len(fields) <= start {
		return ""
	}
	return fields[start]
}
