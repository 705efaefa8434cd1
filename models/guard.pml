/* The guard's refusal of messages (native/guard/guard.cc, native/mpi/messages.cc, and `_raise` in
 * src/mpigrad/guard/watchdog.py).
 *
 * Each rank runs one operation with messages: it announces them, looks at the board until they are
 * possible, and enters MPI. The watchdog proves that ranks are stuck, and publishes a verdict that
 * refuses their operations, and the next operation of every other rank. A refused rank withdraws its
 * messages and ends. Each step of a rank reads or writes the board once, and the steps interleave.
 * A state in which a rank waits in MPI, or on the board, for ever is an error ("invalid end state").
 *
 * Loads and stores are sequentially consistent here. The protocol only passes messages by release
 * and acquire, and PUBLISH shows what is lost when a verdict is published without release.
 */
#ifndef PROTOCOL  /* how a rank looks at a message, and how it withdraws its own */
#define PROTOCOL 3
#endif
#define FIRST 0  /* count, then polling. To withdraw: polling=0, then the counts (A14) */
#define SWAPPED 1  /* polling, then count. To withdraw: the counts, then polling=0 */
#define AGAIN 2  /* count, polling, and count again. To withdraw: the counts, then polling=0 */
#define LOCKED 3  /* as FIRST, but to enter MPI, or to withdraw, a rank looks under a lock */

#ifndef MARKS  /* what a look remembers of the ranks that it has met */
#define MARKS 2
#endif
#define SEEN 0  /* a rank that was met is possible */
#define REFUTED 1  /* and a rank that was refuted is not */
#define FORGET 2  /* and what was assumed on the way to a refutation is forgotten */

#ifndef PUBLISH  /* 1: the number of verdicts may be visible before the verdict (A18) */
#define PUBLISH 0
#endif

/* The programs. A set of ranks is a mask: bit q stands for rank q.
 * 1: ranks 0 and 1 are stuck, and rank 2 receives a message of rank 0, which may be withdrawn.
 * 2: a wildcard receive in rank 2 has two candidates. The second depends on the first, which is stuck.
 * 3: rank 0 is stuck. Ranks 1 and 2 exchange a message, and the verdict concerns them too.
 * 4: as 3, with a message in each direction. */
#ifndef PROGRAM
#define PROGRAM 1
#endif
#define N 3
#if PROGRAM == 1
#define SENDS(r) ((r) == 0 -> 4 : 0)
#define RECEIVES(r) ((r) == 0 -> 2 : 1)
#define WILD(r) 0
#elif PROGRAM == 2
#define SENDS(r) ((r) == 0 -> 6 : ((r) == 1 -> 5 : 0))
#define RECEIVES(r) ((r) == 0 -> 6 : ((r) == 1 -> 1 : 0))
#define WILD(r) ((r) == 2)
#elif PROGRAM == 3
#define SENDS(r) ((r) == 1 -> 4 : 0)
#define RECEIVES(r) ((r) == 0 -> 1 : ((r) == 2 -> 2 : 0))
#define WILD(r) 0
#elif PROGRAM == 4
#define SENDS(r) ((r) == 1 -> 4 : ((r) == 2 -> 2 : 0))
#define RECEIVES(r) ((r) == 0 -> 1 : ((r) == 1 -> 4 : 2))
#define WILD(r) 0
#endif
#define HAS(mask, r) (((mask) >> (r)) & 1)

#define NEXT 9  /* in a verdict: refuses the next operation */
typedef Verdict { byte serials[N] };

bool announced[N], polling[N], entered[N], ended[N];
bool settled[N];  /* it writes nothing until it enters MPI or is refused */
byte sent[N], posted[N];  /* counts of messages, as masks */
byte serial[N];
Verdict verdict[4];
byte faults, faults_read[N];
bool lock;
bool changed[N + 1];  /* the board, since a rank (or the watchdog: N) began its last look */

inline touch() { changed[0] = true; changed[1] = true; changed[2] = true; changed[N] = true }

/* take_fault of guard.cc */
mtype = { now, begin, waiting };
inline take_fault(when) {
  atomic {
    hit = false;
    later = false;
    v = faults_read[me];
    do
    :: v >= faults -> faults_read[me] = (later -> faults_read[me] : faults); break
    :: else ->
       if
       :: verdict[v].serials[me] == serial[me] ||
          (verdict[v].serials[me] == NEXT && when == waiting) ->
          faults_read[me] = v + 1; hit = true; break
       :: verdict[v].serials[me] == NEXT && when == begin ->
          faults_read[me] = faults; hit = true; break
       :: else -> later = later || verdict[v].serials[me] == NEXT; v++
       fi
    od;
    v = 0
  }
}

/* Exchange::possible of messages.cc, with a stack of its own. A frame is a rank and the next of its
 * parts: receives from ranks 0 to N-1, then sends to them. A part takes two looks at the board. */
#define COUNTED(r, k) (k < N -> HAS(sent[k], r) : \
                       (WILD(k - N) -> announced[k - N] : HAS(posted[k - N], r)))
#define WAITS(r, k) (k < N -> announced[k] && polling[k] && HAS(SENDS(k), r) : \
                     announced[k - N] && polling[k - N] && HAS(RECEIVES(k - N), r))
#define PART(r, k) (k < N -> WILD(r) || HAS(RECEIVES(r), k) : HAS(SENDS(r), k - N))

inline look(first_look) {  /* one look at the board */
  if
  :: (PROTOCOL != SWAPPED) == first_look -> count = COUNTED(at[sp], part[sp])
  :: else -> wait_ = WAITS(at[sp], part[sp])
  fi
}

inline evaluate() {
  atomic { at[0] = me; seen = 1 << me; step = 0 };
  do
  :: atomic { step == 0 ->  /* up to the first look of the next part */
       do
       :: part[sp] < 2 * N && !PART(at[sp], part[sp]) -> part[sp]++
       :: else -> break
       od;
       if
       :: part[sp] == 2 * N -> answer = true; step = 3
       :: else -> look(true); step = 1
       fi
     }
  :: atomic { step == 1 ->  /* the second look */
       look(false);
       step = (PROTOCOL == AGAIN && count && !wait_ -> 5 : 6)
     }
  :: atomic { step == 5 -> look(true); step = 6 }  /* the third */
  :: atomic { step == 6 ->  /* what follows */
       q = part[sp] % N;
       step = 2;
       if
       :: !count -> answer = false
       :: count && wait_ && MARKS != SEEN && HAS(refuted, q) -> answer = false
       :: count && (!wait_ || HAS(seen, q) && (MARKS == SEEN || !HAS(refuted, q))) -> answer = true
       :: else ->
          sp++; at[sp] = q; saved[sp] = seen; seen = seen | (1 << q); step = 0
       fi;
       count = false; wait_ = false; q = 0
     }
  :: atomic { step == 2 || step == 3 ->  /* the answer of a part (2) or of a rank (3) */
       do
       :: step == 2 && part[sp] < N && WILD(at[sp]) ->
          if
          :: answer -> part[sp] = N; step = 0
          :: !answer && part[sp] < N - 1 -> part[sp]++; step = 0
          :: else -> step = 3
          fi
       :: step == 2 && !(part[sp] < N && WILD(at[sp])) ->
          if
          :: answer -> part[sp]++; step = 0
          :: else -> step = 3
          fi
       :: step == 3 ->
          if
          :: !answer && MARKS != SEEN -> refuted = refuted | (1 << at[sp])
          :: else
          fi;
          if
          :: !answer && MARKS == FORGET -> seen = saved[sp]
          :: else
          fi;
          at[sp] = 0; part[sp] = 0; saved[sp] = 0;
          if
          :: sp == 0 -> ok = answer; step = 4
          :: else -> sp--; step = 2
          fi
       :: step == 0 || step == 4 -> break
       od;
       answer = false
     }
  :: atomic { step == 4 -> seen = 0; refuted = 0; step = 0; break }
  od
}

inline withdraw() {
  atomic { posted[me] = 0; touch() };
  atomic { sent[me] = 0; touch() }
}

#define MET(q) (!HAS(RECEIVES(me), q) || entered[q] && HAS(SENDS(q), me)) && \
               (!HAS(SENDS(me), q) || entered[q] && (HAS(RECEIVES(q), me) || WILD(q)))
#define COMES(q) (entered[q] && HAS(SENDS(q), me))

proctype Rank(byte me) {
  bool hit, later, ok, count, wait_, answer;
  byte v, sp, at[N + 1], part[N + 1], saved[N + 1], seen, refuted, step, q;
  serial[me] = 1;
  take_fault(begin);
  if
  :: hit -> goto refused
  :: else
  fi;
  atomic { polling[me] = true; announced[me] = true; touch() };
  atomic { posted[me] = (WILD(me) -> 0 : RECEIVES(me)); touch() };
  atomic { sent[me] = SENDS(me); settled[me] = true; touch() };
  do
  :: if
     :: PROTOCOL == LOCKED -> atomic { !lock -> lock = true; changed[me] = false }
     :: else -> changed[me] = false
     fi;
     take_fault(now);
     if
     :: hit -> break
     :: else
     fi;
     evaluate();
     if
     :: ok -> take_fault(now); break
     :: else
     fi;
     take_fault(waiting);
     if
     :: hit -> break
     :: else
     fi;
     if
     :: PROTOCOL == LOCKED -> lock = false
     :: else
     fi;
     changed[me]
  od;
  settled[me] = !hit;
  if
  :: hit && (PROTOCOL == SWAPPED || PROTOCOL == AGAIN) -> withdraw()
  :: else
  fi;
  atomic { polling[me] = false; touch() };
  if
  :: hit && (PROTOCOL == FIRST || PROTOCOL == LOCKED) -> withdraw()
  :: else
  fi;
  if
  :: PROTOCOL == LOCKED -> lock = false
  :: else
  fi;
  if
  :: !hit ->
     entered[me] = true;
     MET(0) && MET(1) && MET(2) && (!WILD(me) || COMES(0) || COMES(1) || COMES(2))
  :: else
  fi;
refused:
  atomic { serial[me] = 2; announced[me] = false; settled[me] = false; ended[me] = true; touch() }
}

/* The proof of wait_graph.py, at one moment: the watchdog looks twice, and a stuck rank writes
 * nothing. (With several candidates for a wildcard receive Python proves less.) */
#define NEEDS(r, q) (HAS(RECEIVES(r), q) && !HAS(sent[q], r) || \
                     HAS(SENDS(r), q) && !WILD(q) && !HAS(posted[q], r))
#define TOGETHER(r, q) (HAS(RECEIVES(r), q) && WAITS(r, q) || HAS(SENDS(r), q) && WAITS(r, q + N))
/* Is there a candidate for the wildcard receive of r, or a rank that may still send? */
#define CANDIDATE(r, q, set) (q != r && (HAS(sent[q], r) || !settled[q]) && HAS(set, q))

proctype Watchdog() {
  byte r, q, going, more, before, stuck, refused, i;
  bool polls, other;
end:
  do
  :: d_step {
       changed[N] = false;
       going = 0;
       r = 0;
       do
       :: r < N -> going = going | ((!settled[r] && !ended[r]) << r); r++
       :: else -> break
       od;
       i = 0;
       do
       :: i < N ->
          more = 0;
          r = 0;
          do  /* ranks that need nobody but going ranks */
          :: r < N ->
             if
             :: settled[r] && !HAS(going, r) && !(NEEDS(r, 0) && !HAS(going, 0)) &&
                !(NEEDS(r, 1) && !HAS(going, 1)) && !(NEEDS(r, 2) && !HAS(going, 2)) ->
                more = more | (1 << r)
             :: else
             fi;
             r++
          :: else -> break
          od;
          before = 255;
          do  /* and whose partners go with them */
          :: before != more ->
             before = more;
             r = 0;
             do
             :: r < N ->
                if
                :: TOGETHER(r, 0) && !HAS(going | more, 0) ||
                   TOGETHER(r, 1) && !HAS(going | more, 1) ||
                   TOGETHER(r, 2) && !HAS(going | more, 2) ||
                   WILD(r) && !CANDIDATE(r, 0, going | more) &&
                   !CANDIDATE(r, 1, going | more) && !CANDIDATE(r, 2, going | more) ->
                   more = more & (7 - (1 << r))
                :: else
                fi;
                r++
             :: else -> break
             od
          :: else -> break
          od;
          going = going | more;
          i++
       :: else -> break
       od;
       stuck = 0;
       polls = true;
       r = 0;
       do
       :: r < N ->
          if
          :: settled[r] && !HAS(going, r) -> stuck = stuck | (1 << r); polls = polls && polling[r]
          :: else
          fi;
          r++
       :: else -> break
       od;
       polls = polls && stuck && stuck != refused;
       r = 0; q = 0; i = 0; going = 0; more = 0; before = 0
     };
     if
     :: polls ->
        if
        :: PUBLISH == 1 -> faults++
        :: else
        fi;
        d_step {
          i = faults - (PUBLISH == 1);
          r = 0;
          do  /* Python publishes nothing if a serial number has changed */
          :: r < N -> other = other || HAS(stuck, r) && serial[r] != 1; r++
          :: else -> break
          od;
          r = 0;
          do
          :: !other && r < N ->
             verdict[i].serials[r] = (ended[r] -> 0 : (HAS(stuck, r) -> 1 : NEXT));
             r++
          :: else -> break
          od;
          if
          :: !other -> faults = i + 1; refused = stuck; touch()
          :: else
          fi;
          r = 0; i = 0; stuck = 0; polls = false; other = false
        }
     :: else ->
        stuck = 0; polls = false;
end_wait:
        changed[N]
     fi
  od
}

init {
  atomic { run Rank(0); run Rank(1); run Rank(2); run Watchdog() }
}
