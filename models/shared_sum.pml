/* The sum through shared memory (native/mpi/shared_sum.cc).
 *
 * Ranks interleave freely. The orders of C++11 are modelled by vector clocks: a release store keeps
 * the clock of its rank, and an acquire load takes it over. Two accesses to the same plain memory
 * that no clock orders are a data race, which is an error here as it is in C++. A program without
 * data races runs on every processor as it does here, on AArch64 too, because compilers translate
 * release and acquire to the instructions that this needs. A load that waits for the value n takes
 * the clock of exactly this value. Later values have later clocks, so this is the weakest case.
 *
 * MUTANT weakens one step, and the model must find an error:
 *   1 written is stored without release        2 read is stored without release
 *   3 written is loaded without acquire        4 read is loaded without acquire
 *   5 no wait at a change of communicator      6 one piece of memory instead of two
 *   7 read is stored before the pieces are read
 *   8 the wait at a change looks at the new communicator
 */
#ifndef MUTANT
#define MUTANT 0
#endif
#ifndef RANKS
#define RANKS 2
#endif
#ifndef SUMS
#define SUMS 4
#endif
#define COMMS 2
#define MOST (SUMS + 2)  /* pieces of one communicator */
#define BUFFER(n) ((n) % (2 - (MUTANT == 6)))

/* Communicator 0 has all ranks. Communicator 1 has ranks 0 and 1. */
#define MEMBER(r, s) ((s) == 0 || (r) < 2)
/* The first sum has 3 pieces, the others have one. All choices of communicators are explored. */
byte order;  /* bit i: the communicator of sum i */
byte mismatch;  /* the sum in which rank 1 passes another array. SUMS: none */
#define COMM(sum) ((order >> (sum)) & 1)
#define PIECES(sum) ((sum) == 0 -> 3 : 1)

typedef Clock { byte t[RANKS] };
typedef Store { byte value; Clock at[MOST + 1] };  /* a counter, and the clock of each value */
typedef Memory { byte comm, piece, kind, written; byte read[RANKS] };  /* when it was accessed */
typedef Progress { Store written, read };
typedef Rank { Progress progress[COMMS]; Memory piece[2]; Clock now };
Rank rank[RANKS];
byte wrong;  /* bit r: rank r found the mismatch */

inline release(counter, n, weak) {
  d_step {
    j = 0;
    do
    :: j < RANKS -> counter.at[n].t[j] = ((weak) -> 0 : rank[me].now.t[j]); j++
    :: else -> break
    od;
    counter.value = n;
    rank[me].now.t[me]++;
    j = 0
  }
}

inline acquire(counter, n, weak) {
  d_step {
    counter.value >= n;
    j = 0;
    do
    :: j < RANKS ->
       if
       :: !(weak) && counter.at[n].t[j] > rank[me].now.t[j] ->
          rank[me].now.t[j] = counter.at[n].t[j]
       :: else
       fi;
       j++
    :: else -> break
    od;
    j = 0
  }
}

/* No read of another rank is concurrent with this write. */
inline write_piece(b, comm_, n, kind_) {
  d_step {
    j = 0;
    do
    :: j < RANKS -> assert(rank[me].piece[b].read[j] <= rank[me].now.t[j]); j++
    :: else -> break
    od;
    rank[me].piece[b].written = rank[me].now.t[me];
    rank[me].piece[b].comm = comm_;
    rank[me].piece[b].piece = n;
    rank[me].piece[b].kind = kind_;
    j = 0
  }
}

/* The write happened before this read, and it was the right one. */
inline read_piece(m, b, comm_, n) {
  d_step {
    assert(rank[m].piece[b].written <= rank[me].now.t[m]);
    assert(rank[m].piece[b].comm == comm_ && rank[m].piece[b].piece == n);
    rank[m].piece[b].read[me] = rank[me].now.t[me]
  }
}

proctype Member(byte me) {
  byte sum, s, p, n, m, last, j, before;
  bool differ;
  d_step { rank[me].now.t[me] = 1 }
  do
  :: sum == SUMS -> break
  :: sum < SUMS && !MEMBER(me, COMM(sum)) -> sum++
  :: sum < SUMS && MEMBER(me, COMM(sum)) ->
     s = COMM(sum);
     if
     :: s != last && MUTANT != 5 ->
        before = (MUTANT == 8 -> s : last);
        n = rank[me].progress[before].written.value;
        m = 0;
        do
        :: m == RANKS -> break
        :: m < RANKS && (!MEMBER(m, before) || m == me || n == 0) -> m++
        :: m < RANKS && MEMBER(m, before) && m != me && n > 0 ->
           acquire(rank[m].progress[before].read, n, MUTANT == 4);
           m++
        od
     :: else
     fi;
     last = s;
     p = 0;
     differ = false;
     do
     :: p == PIECES(sum) || differ -> break
     :: p < PIECES(sum) && !differ ->
        n = rank[me].progress[s].written.value + 1;
        write_piece(BUFFER(n), s, n, (sum == mismatch && me == 1));
        release(rank[me].progress[s].written, n, MUTANT == 1);
        m = 0;
        do
        :: m == RANKS -> break
        :: m < RANKS && (!MEMBER(m, s) || m == me) -> m++
        :: m < RANKS && MEMBER(m, s) && m != me ->
           acquire(rank[m].progress[s].written, n, MUTANT == 3);
           m++
        od;
        if
        :: MUTANT == 7 -> release(rank[me].progress[s].read, n, false)
        :: else
        fi;
        m = 0;
        do
        :: m == RANKS -> break
        :: m < RANKS && !MEMBER(m, s) -> m++
        :: m < RANKS && MEMBER(m, s) ->
           read_piece(m, BUFFER(n), s, n);
           differ = differ || rank[m].piece[BUFFER(n)].kind != rank[0].piece[BUFFER(n)].kind;
           m++
        od;
        if
        :: MUTANT != 7 -> release(rank[me].progress[s].read, n, MUTANT == 2)
        :: else
        fi;
        p++
     od;
     if
     :: differ -> wrong = wrong | (1 << me)
     :: else
     fi;
     sum++
  od
}

init {
  byte i;
  atomic {
    select(order : 0 .. (1 << SUMS) - 1);
    select(mismatch : 0 .. SUMS);
    do
    :: i < RANKS -> run Member(i); i++
    :: else -> break
    od
  }
  _nr_pr == 1;
  /* All members of the sum found the mismatch, or none did. */
  assert(wrong == (mismatch == SUMS -> 0 : (COMM(mismatch) == 0 -> (1 << RANKS) - 1 : 3)))
}
