-- run_label: write the note or the tags of a run, which was read through its tenant. The bytes count as records.
-- needs: records
-- A note or tags that are not in `args` stay unchanged. Idempotent.
local args = cjson.decode(ARGV[1])
local record_key = 'cotrain:run:' .. args.run
local labelled = 'cotrain:tenant:' .. args.tenant .. ':labelled_runs'

if redis.call('EXISTS', record_key) == 0 then
  return 'GONE'
end
local before = redis.call('HMGET', record_key, 'note', 'tags')
local after = { args.note or before[1] or '', args.tags or before[2] or '' }
local more = #after[1] + #after[2] - #(before[1] or '') - #(before[2] or '')
if more > 0 and record_bytes(args.tenant) + more > args.max_record_bytes then
  return 'RECORDS'
end
redis.call('HSET', record_key, 'note', after[1], 'tags', after[2])
redis.call('INCRBY', 'cotrain:tenant:' .. args.tenant .. ':record_bytes', more)
if after[1] == '' and after[2] == '' then
  redis.call('ZREM', labelled, args.run)
else
  redis.call('ZADD', labelled, args.created_at, args.run)
end
return 'OK'
